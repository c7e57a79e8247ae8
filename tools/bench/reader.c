/* The readers of the benchmarks: the same few system calls for every peer, nothing else timed.
 *
 * reader files LIST READERS [BATCH AHEAD]
 *                                  open, fstat, read, close of each file in LIST (one path a line); with AHEAD no
 *                                  batch is begun before all are read that lie so many before it, as data loaders do
 * reader await LIST                 open, fstat, close of each, when all its pages are in the kernel's cache
 * reader list DIRECTORY             getdents of one directory
 * reader stat DIRECTORY             fstatat of each of its entries (listing them is not timed)
 * reader stream FILE                sequential reads of 1 MiB
 * reader direct FILE                sequential reads of 4 MiB past the page cache
 * reader tree DIRECTORY             lists it and each directory in it
 * reader make DIRECTORY DIRS FILES  empty files, FILES in each of DIRS directories
 * reader fill DIRECTORY COUNT BYTES SEED   files of random bytes: COUNT in folders of 500
 *
 * Prints "SECONDS ITEMS BYTES". With several readers the list is dealt out, all start together and the
 * last one's end counts. Any error ends it with a message and code 1: a wrong figure is worse than none.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void die(const char *what) {
    fprintf(stderr, "reader: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void report(double seconds, uint64_t items, uint64_t bytes) {
    printf("%.9f %llu %llu\n", seconds, (unsigned long long)items, (unsigned long long)bytes);
}

/* ---- files ---- */

static char **paths;
static size_t path_count;

static void load_paths(const char *list) {
    FILE *in = fopen(list, "r");
    if (!in) die(list);
    char *line = NULL;
    size_t room = 0, slots = 0;
    ssize_t length;
    while ((length = getline(&line, &room, in)) > 0) {
        if (line[length - 1] == '\n') line[length - 1] = 0;
        if (path_count == slots) {
            slots = slots ? slots * 2 : 1024;
            paths = realloc(paths, slots * sizeof *paths);
            if (!paths) die("memory");
        }
        paths[path_count++] = strdup(line);
    }
    fclose(in);
    free(line);
}

/* What the readers of a list share. */
struct shared {
    double begin[64], end[64];
    uint64_t bytes[64];
    volatile int ready;
    size_t batches[64];  /* that each has read */
    uint32_t batch_ends; /* counts them all: what is waited for */
};

/* Batches are dealt out in turn: whether all up to `last` have been read. */
static int are_read(struct shared *s, size_t readers, size_t last) {
    for (size_t r = 0; r < readers && r <= last; r++)
        if (__atomic_load_n(&s->batches[r], __ATOMIC_SEQ_CST) < (last - r) / readers + 1) return 0;
    return 1;
}

static void await_batch(struct shared *s, size_t readers, size_t last) {
    for (;;) {
        uint32_t seen = __atomic_load_n(&s->batch_ends, __ATOMIC_SEQ_CST);
        if (are_read(s, readers, last)) return;
        syscall(SYS_futex, &s->batch_ends, FUTEX_WAIT, seen, NULL, NULL, 0);
    }
}

static void end_batch(struct shared *s, size_t reader) {
    __atomic_add_fetch(&s->batches[reader], 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&s->batch_ends, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &s->batch_ends, FUTEX_WAKE, 64, NULL, NULL, 0);
}

static uint64_t read_files(struct shared *s, size_t first, size_t step, size_t batch, size_t ahead) {
    size_t room = 1 << 20;
    /* malloc's would begin 16 bytes into a page, whereto AMD's processors copy at a twelfth of their speed */
    char *buffer = aligned_alloc(4096, room);
    uint64_t total = 0;
    if (!buffer) die("memory");
    memset(buffer, 1, room); /* the page faults of the buffer are not the peer's */
    for (size_t i = first * batch; i < path_count; i += (i + 1) % batch ? 1 : 1 + (step - 1) * batch) {
        struct stat st;
        if (ahead && i % batch == 0 && i / batch >= ahead) await_batch(s, step, i / batch - ahead);
        int fd = open(paths[i], O_RDONLY);
        if (fd < 0) die(paths[i]);
        if (fstat(fd, &st)) die(paths[i]);
        if ((size_t)st.st_size > room) {
            room = ((size_t)st.st_size + 4095) & ~(size_t)4095;
            free(buffer);
            buffer = aligned_alloc(4096, room);
            if (!buffer) die("memory");
        }
        size_t got = 0;
        while (got < (size_t)st.st_size) {
            ssize_t n = read(fd, buffer + got, (size_t)st.st_size - got);
            if (n <= 0) {
                if (n == 0) errno = EIO; /* shorter than fstat said */
                die(paths[i]);
            }
            got += (size_t)n;
        }
        total += got;
        close(fd);
        if (ahead && (i + 1) % batch == 0) end_batch(s, first);
    }
    free(buffer);
    return total;
}

static void files(const char *list, int readers, size_t batch, size_t ahead) {
    struct shared *s;
    load_paths(list);
    if (readers < 1 || readers > 64 || batch < 1) { errno = EINVAL; die("readers"); }
    s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (s == MAP_FAILED) die("mmap");
    int gate[2];
    if (pipe(gate)) die("pipe");
    for (int r = 0; r < readers; r++) {
        pid_t pid = fork();
        if (pid < 0) die("fork");
        if (pid == 0) {
            char byte;
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            close(gate[1]);
            __sync_fetch_and_add(&s->ready, 1);
            while (read(gate[0], &byte, 1) > 0) {} /* opens when the parent closes its end */
            s->begin[r] = now();
            s->bytes[r] = read_files(s, (size_t)r, (size_t)readers, batch, ahead);
            s->end[r] = now();
            _exit(0);
        }
    }
    while (s->ready < readers) usleep(200);
    usleep(2000);
    close(gate[0]);
    close(gate[1]);
    int status;
    while (wait(&status) > 0)
        if (status) exit(1); /* the others go with us: they may wait for it */
    double begin = s->begin[0], end = s->end[0];
    uint64_t bytes = 0;
    for (int r = 0; r < readers; r++) {
        if (s->begin[r] < begin) begin = s->begin[r];
        if (s->end[r] > end) end = s->end[r];
        bytes += s->bytes[r];
    }
    report(end - begin, path_count, bytes);
}

/* Whether all pages of the file are cached; touches none of them. */
static int is_there(int fd, size_t size) {
    static unsigned char found[1 << 16];
    size_t pages = (size + 4095) / 4096;
    int there = 1;
    if (!size) return 1;
    if (pages > sizeof found) { errno = EFBIG; die("await"); }
    void *at = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED || mincore(at, size, found)) die("mincore");
    for (size_t i = 0; i < pages; i++) there &= found[i];
    munmap(at, size);
    return there;
}

static void await(const char *list) {
    static char buffer[1 << 20];
    uint64_t total = 0;
    load_paths(list);
    double begin = now();
    for (size_t i = 0; i < path_count; i++) {
        struct stat st;
        int fd = open(paths[i], O_RDONLY);
        if (fd < 0 || fstat(fd, &st)) die(paths[i]);
        double since = now();
        while (!is_there(fd, (size_t)st.st_size)) {
            ssize_t n = 0;
            if (now() - since > 0.005)
                while ((n = read(fd, buffer, sizeof buffer)) > 0) {}
            if (n < 0) die(paths[i]);
            usleep(100);
        }
        total += (uint64_t)st.st_size;
        close(fd);
    }
    report(now() - begin, path_count, total);
}

/* ---- directories ---- */

struct linux_dirent64 {
    uint64_t d_ino;
    int64_t d_off;
    unsigned short d_reclen;
    unsigned char d_type;
    char d_name[];
};

typedef void entry_function(const char *name, unsigned char type);

static uint64_t each_entry(int fd, const char *name, entry_function *f) {
    static char buffer[1 << 17];
    uint64_t entries = 0;
    for (;;) {
        long n = syscall(SYS_getdents64, fd, buffer, sizeof buffer);
        if (n < 0) die(name);
        if (n == 0) return entries;
        for (long at = 0; at < n;) {
            struct linux_dirent64 *d = (struct linux_dirent64 *)(buffer + at);
            at += d->d_reclen;
            if (d->d_name[0] == '.' && (!d->d_name[1] || (d->d_name[1] == '.' && !d->d_name[2])))
                continue;
            entries++;
            if (f) f(d->d_name, d->d_type);
        }
    }
}

static int open_directory(int at, const char *name) {
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY);
    if (fd < 0) die(name);
    return fd;
}

static char **names;
static size_t name_count, name_slots;

static void keep_name(const char *name, unsigned char type) {
    (void)type;
    if (name_count == name_slots) {
        name_slots = name_slots ? name_slots * 2 : 1024;
        names = realloc(names, name_slots * sizeof *names);
        if (!names) die("memory");
    }
    names[name_count++] = strdup(name);
}

static void keep_directory(const char *name, unsigned char type) {
    if (type == DT_DIR) keep_name(name, type);
}

static void list(const char *directory) {
    double begin = now();
    int fd = open_directory(AT_FDCWD, directory);
    uint64_t entries = each_entry(fd, directory, NULL);
    close(fd);
    report(now() - begin, entries, 0);
}

static void stat_each(const char *directory) {
    int fd = open_directory(AT_FDCWD, directory);
    each_entry(fd, directory, keep_name);
    uint64_t bytes = 0;
    double begin = now();
    for (size_t i = 0; i < name_count; i++) {
        struct stat st;
        if (fstatat(fd, names[i], &st, AT_SYMLINK_NOFOLLOW)) die(names[i]);
        bytes += (uint64_t)st.st_size;
    }
    report(now() - begin, name_count, bytes);
}

static void tree(const char *directory) {
    double begin = now();
    int fd = open_directory(AT_FDCWD, directory);
    uint64_t entries = each_entry(fd, directory, keep_directory);
    for (size_t i = 0; i < name_count; i++) {
        int below = open_directory(fd, names[i]);
        entries += each_entry(below, names[i], NULL);
        close(below);
    }
    report(now() - begin, entries, 0);
}

/* ---- one large file, and making data ---- */

static void stream(const char *path) {
    static char buffer[1 << 20];
    uint64_t total = 0;
    ssize_t n;
    memset(buffer, 1, sizeof buffer);
    double begin = now();
    int fd = open(path, O_RDONLY);
    if (fd < 0) die(path);
    while ((n = read(fd, buffer, sizeof buffer)) > 0) total += (uint64_t)n;
    if (n < 0) die(path);
    close(fd);
    report(now() - begin, 1, total);
}

static void direct(const char *path) {
    const size_t part = 4 << 20;
    uint64_t total = 0;
    ssize_t n;
    void *buffer;
    if (posix_memalign(&buffer, 4096, part)) die("memory");
    memset(buffer, 1, part);
    double begin = now();
    int fd = open(path, O_RDONLY | O_DIRECT);
    if (fd < 0) die(path);
    while ((n = read(fd, buffer, part)) > 0) total += (uint64_t)n;
    if (n < 0) die(path);
    close(fd);
    report(now() - begin, 1, total);
    free(buffer);
}

static void make(const char *directory, long dirs, long count) {
    char name[64];
    double begin = now();
    int fd = open_directory(AT_FDCWD, directory);
    for (long d = 0; d < dirs; d++) {
        snprintf(name, sizeof name, "n%08ld", d);
        if (mkdirat(fd, name, 0755)) die(name);
        int below = open_directory(fd, name);
        for (long f = 0; f < count; f++) {
            snprintf(name, sizeof name, "n%08ld_%06ld.JPEG", d, f);
            int file = openat(below, name, O_WRONLY | O_CREAT | O_EXCL, 0644);
            if (file < 0) die(name);
            close(file);
        }
        close(below);
    }
    report(now() - begin, (uint64_t)(dirs * count), 0);
}

static uint64_t state;

static uint64_t random_word(void) { /* splitmix64: fast, and no block of the data is like another */
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static void fill(const char *directory, long count, uint64_t size, uint64_t seed) {
    static uint64_t buffer[1 << 15];
    char name[64];
    double begin = now();
    int fd = open_directory(AT_FDCWD, directory);
    state = seed;
    for (long f = 0; f < count; f++) {
        snprintf(name, sizeof name, "d%04ld", f / 500);
        if (f % 500 == 0 && mkdirat(fd, name, 0755)) die(name);
        snprintf(name, sizeof name, "d%04ld/%07ld.bin", f / 500, f);
        int file = openat(fd, name, O_WRONLY | O_CREAT | O_EXCL, 0644);
        if (file < 0) die(name);
        for (uint64_t left = size; left;) {
            uint64_t part = left < sizeof buffer ? left : sizeof buffer;
            for (uint64_t i = 0; i < (part + 7) / 8; i++) buffer[i] = random_word();
            if (write(file, buffer, part) != (ssize_t)part) die(name);
            left -= part;
        }
        close(file);
    }
    report(now() - begin, (uint64_t)count, (uint64_t)count * size);
}

int main(int argc, char **argv) {
    const char *what = argc > 2 ? argv[1] : "";
    if (argc == 4 && !strcmp(what, "files")) files(argv[2], atoi(argv[3]), 1, 0);
    else if (argc == 6 && !strcmp(what, "files"))
        files(argv[2], atoi(argv[3]), (size_t)atol(argv[4]), (size_t)atol(argv[5]));
    else if (argc == 3 && !strcmp(what, "await")) await(argv[2]);
    else if (argc == 3 && !strcmp(what, "direct")) direct(argv[2]);
    else if (argc == 3 && !strcmp(what, "list")) list(argv[2]);
    else if (argc == 3 && !strcmp(what, "stat")) stat_each(argv[2]);
    else if (argc == 3 && !strcmp(what, "stream")) stream(argv[2]);
    else if (argc == 3 && !strcmp(what, "tree")) tree(argv[2]);
    else if (argc == 5 && !strcmp(what, "make")) make(argv[2], atol(argv[3]), atol(argv[4]));
    else if (argc == 6 && !strcmp(what, "fill"))
        fill(argv[2], atol(argv[3]), strtoull(argv[4], NULL, 10), strtoull(argv[5], NULL, 10));
    else {
        fprintf(stderr, "usage: see the top of reader.c\n");
        return 2;
    }
    return 0;
}
