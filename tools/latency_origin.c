/* A read-only view of a directory in which every request takes a given time: the latency of a network
 * file server without its bandwidth limit.
 *
 * latency_origin SOURCE MICROSECONDS TRUST_SECONDS MOUNTPOINT [FUSE OPTIONS]
 *
 * The kernel trusts names and attributes for TRUST_SECONDS. Requests of any number wait side by side. It
 * stands for a server elsewhere, so it should cost this machine as little as possible: all requests wait
 * equally long, so they are a first-in first-out of one thread, and those that are due within TOGETHER_NS
 * of each other are one timer.
 */
#define FUSE_USE_VERSION 312
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse_lowlevel.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define REQUESTS_MOST 512
#define READ_BYTES_MOST (1u << 20)
#define TOGETHER_NS 250000 /* half of it is the error of the latency */

#define HOSTS_MOST 64 /* as in latency_origin.py */
#define BURST_NS 5000000 /* of an idle origin: what a server that wakes up late may catch up */

struct meter {
    _Atomic int64_t bytes_per_s; /* of all hosts together; 0: no limit */
    _Atomic int64_t free_ns; /* CLOCK_MONOTONIC: when all that was read so far has passed */
    struct { _Atomic uint64_t bytes, files; } hosts[HOSTS_MOST]; /* files: reads of a first byte */
};

static int source;
static int64_t latency_ns;
static double trust_s;
static struct meter *meter;
static int host;

/* An inode is the O_PATH descriptor of its first look-up + 2; kept for good. */
static int path_fd(fuse_ino_t ino) { return ino == FUSE_ROOT_ID ? source : (int)ino - 2; }

static void begin(void *unused, struct fuse_conn_info *conn) {
    (void)unused;
    conn->want &= ~(unsigned)(FUSE_CAP_READDIRPLUS_AUTO | FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE);
    conn->max_background = REQUESTS_MOST;
    conn->congestion_threshold = REQUESTS_MOST;
}

static int look_up(int parent, const char *name, struct fuse_entry_param *entry) {
    int fd = openat(parent, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    memset(entry, 0, sizeof *entry);
    if (fd < 0 && errno == EMFILE) { /* a file left out would make whoever is measured look faster */
        fprintf(stderr, "latency_origin: more files than descriptors: raise ulimit -Hn, or use fewer\n");
        _exit(1);
    }
    if (fd < 0 || fstatat(fd, "", &entry->attr, AT_EMPTY_PATH)) return errno;
    entry->ino = (fuse_ino_t)fd + 2;
    entry->attr_timeout = entry->entry_timeout = trust_s;
    return 0;
}

/* One descriptor a name: a repeated look-up must give the same inode. */
struct known { struct known *next; fuse_ino_t parent, ino; char name[]; };
static struct known *known[1 << 16];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int look_up_once(fuse_ino_t parent, const char *name, struct fuse_entry_param *entry) {
    size_t hash = parent;
    for (const char *c = name; *c; c++) hash = hash * 31 + (unsigned char)*c;
    struct known **slot = &known[hash % (sizeof known / sizeof *known)], *at;
    pthread_mutex_lock(&lock);
    for (at = *slot; at && (at->parent != parent || strcmp(at->name, name)); at = at->next) {}
    int error = 0;
    if (at) {
        memset(entry, 0, sizeof *entry);
        entry->ino = at->ino;
        entry->attr_timeout = entry->entry_timeout = trust_s;
        error = fstatat(path_fd(at->ino), "", &entry->attr, AT_EMPTY_PATH) ? errno : 0;
    } else if (!(error = look_up(path_fd(parent), name, entry))) {
        at = malloc(sizeof *at + strlen(name) + 1);
        if (!at) abort();
        *at = (struct known){.next = *slot, .parent = parent, .ino = entry->ino};
        strcpy(at->name, name);
        *slot = at;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

static void op_lookup(fuse_req_t req, fuse_ino_t parent, const char *name) {
    struct fuse_entry_param entry;
    int error = look_up_once(parent, name, &entry);
    if (error) fuse_reply_err(req, error);
    else fuse_reply_entry(req, &entry);
}

static void op_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *file) {
    struct stat st;
    (void)file;
    if (fstatat(path_fd(ino), "", &st, AT_EMPTY_PATH)) fuse_reply_err(req, errno);
    else fuse_reply_attr(req, &st, trust_s);
}

static void op_readlink(fuse_req_t req, fuse_ino_t ino) {
    char target[4096];
    ssize_t length = readlinkat(path_fd(ino), "", target, sizeof target - 1);
    if (length < 0) {
        fuse_reply_err(req, errno);
        return;
    }
    target[length] = 0;
    fuse_reply_readlink(req, target);
}

static int reopen(fuse_ino_t ino, int flags) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", path_fd(ino));
    return open(name, flags | O_CLOEXEC);
}

static void op_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *file) {
    int fd = reopen(ino, O_RDONLY | O_DIRECTORY);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (!directory) {
        fuse_reply_err(req, errno);
        return;
    }
    file->fh = (uintptr_t)directory;
    fuse_reply_open(req, file);
}

static void op_readdirplus(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
                           struct fuse_file_info *file) {
    DIR *directory = (DIR *)(uintptr_t)file->fh;
    char *buffer = malloc(size);
    struct dirent *found;
    size_t used = 0;
    if (offset) seekdir(directory, offset);
    else rewinddir(directory);
    while (buffer && (found = readdir(directory))) {
        struct fuse_entry_param entry = {.ino = 0};
        if (found->d_name[0] == '.' && (!found->d_name[1] || !strcmp(found->d_name, "..")))
            entry.attr = (struct stat){.st_ino = found->d_ino, .st_mode = S_IFDIR};
        else if (look_up_once(ino, found->d_name, &entry))
            continue;
        size_t need = fuse_add_direntry_plus(req, buffer + used, size - used, found->d_name, &entry,
                                             found->d_off);
        if (need > size - used) break;
        used += need;
    }
    fuse_reply_buf(req, buffer, used);
    free(buffer);
}

static void op_releasedir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *file) {
    (void)ino;
    closedir((DIR *)(uintptr_t)file->fh);
    fuse_reply_err(req, 0);
}

static void op_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *file) {
    int fd = reopen(ino, O_RDONLY);
    if (fd < 0) {
        fuse_reply_err(req, errno);
        return;
    }
    file->fh = (uint64_t)fd;
    file->noflush = 1;
    fuse_reply_open(req, file);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

static void wait_until(int64_t due_ns) {
    if (due_ns - TOGETHER_NS / 2 <= now_ns()) return;
    due_ns += TOGETHER_NS / 2;
    struct timespec due = {due_ns / 1000000000, due_ns % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL)) {}
}

static void pass(size_t size, off_t offset) {
    meter->hosts[host].bytes += size;
    if (!offset) meter->hosts[host].files++;
    int64_t rate = meter->bytes_per_s, now = now_ns(), free_ns = meter->free_ns, end;
    if (rate <= 0) return;
    do {
        int64_t begin = free_ns > now - BURST_NS ? free_ns : now - BURST_NS;
        end = begin + (int64_t)size * 1000000000 / rate;
    } while (!atomic_compare_exchange_weak(&meter->free_ns, &free_ns, end));
    wait_until(end);
}

static void op_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
                    struct fuse_file_info *file) {
    static __thread char *buffer; /* one a thread: splicing pages or fresh memory costs more */
    (void)ino;
    if (!buffer) buffer = malloc(READ_BYTES_MOST);
    ssize_t got = pread((int)file->fh, buffer, size < READ_BYTES_MOST ? size : READ_BYTES_MOST, offset);
    if (got < 0) {
        fuse_reply_err(req, errno);
        return;
    }
    if (meter) pass((size_t)got, offset);
    fuse_reply_buf(req, buffer, (size_t)got);
}

static void op_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *file) {
    (void)ino;
    close((int)file->fh);
    fuse_reply_err(req, 0);
}

/* ---- requests wait ---- */
struct request { struct request *next; int64_t due_ns; size_t size; char bytes[]; };
static struct request *first, **end = &first;
static pthread_mutex_t line = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static struct fuse_session *session;

static void *answer(void *unused) {
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&line);
        while (!first) pthread_cond_wait(&wake, &line);
        struct request *request = first;
        if (!(first = request->next)) end = &first;
        pthread_mutex_unlock(&line);
        wait_until(request->due_ns);
        struct fuse_buf buffer = {.mem = request->bytes, .size = request->size};
        fuse_session_process_buf(session, &buffer);
        free(request);
    }
    return NULL;
}

static void receive(void) {
    struct fuse_buf buffer = {.mem = NULL};
    while (!fuse_session_exited(session)) {
        int got = fuse_session_receive_buf(session, &buffer);
        if (got == -EINTR) continue;
        if (got <= 0) break;
        struct request *request = malloc(sizeof *request + (size_t)got);
        if (!request) abort();
        *request = (struct request){.due_ns = now_ns() + latency_ns, .size = (size_t)got};
        memcpy(request->bytes, buffer.mem, (size_t)got);
        pthread_mutex_lock(&line);
        if (!first) pthread_cond_signal(&wake);
        *end = request;
        end = &request->next;
        pthread_mutex_unlock(&line);
    }
}

static int share_meter(const char *file) {
    int fd = open(file, O_RDWR | O_CLOEXEC);
    if (fd < 0) return -1;
    meter = mmap(NULL, sizeof *meter, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return meter == MAP_FAILED ? -1 : 0;
}

int main(int argc, char **argv) {
    static const struct fuse_lowlevel_ops operations = {
        .init = begin,
        .lookup = op_lookup,
        .getattr = op_getattr,
        .readlink = op_readlink,
        .opendir = op_opendir,
        .readdirplus = op_readdirplus,
        .releasedir = op_releasedir,
        .open = op_open,
        .read = op_read,
        .release = op_release,
    };
    struct rlimit files;
    if (argc < 7) return 2;
    if (!getrlimit(RLIMIT_NOFILE, &files)) {
        files.rlim_cur = files.rlim_max; /* a descriptor for each file that is ever looked up */
        setrlimit(RLIMIT_NOFILE, &files);
    }
    source = open(argv[1], O_RDONLY | O_DIRECTORY);
    if (source < 0) return 1;
    latency_ns = atol(argv[2]) * 1000;
    trust_s = atof(argv[3]);
    if (strcmp(argv[4], "-") && share_meter(argv[4])) return 1;
    host = atoi(argv[5]);
    if (host < 0 || host >= HOSTS_MOST) return 2;
    argv[5] = argv[0];
    struct fuse_args args = FUSE_ARGS_INIT(argc - 5, argv + 5);
    struct fuse_cmdline_opts options;
    if (fuse_parse_cmdline(&args, &options)) return 2;
    session = fuse_session_new(&args, &operations, sizeof operations, NULL);
    if (!session || fuse_set_signal_handlers(session) || fuse_session_mount(session, options.mountpoint))
        return 1;
    pthread_t thread;
    if (pthread_create(&thread, NULL, answer, NULL)) return 1;
    receive();
    fuse_session_unmount(session);
    return 0;
}
