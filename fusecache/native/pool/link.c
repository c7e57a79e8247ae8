/* Connections to servers of the pool, plain or TLS, each used by one thread at a time.
 *
 * OpenSSL is looked for when a pool is used: without one the extension needs none.
 */
#include "pool.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/sha.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#define FUNCTIONS(X) \
	X(ERR_clear_error) \
	X(ERR_peek_last_error) \
	X(ERR_reason_error_string) \
	X(SSL_CTX_check_private_key) \
	X(SSL_CTX_ctrl) \
	X(SSL_CTX_free) \
	X(SSL_CTX_load_verify_locations) \
	X(SSL_CTX_new) \
	X(SSL_CTX_set_verify) \
	X(SSL_CTX_use_PrivateKey_file) \
	X(SSL_CTX_use_certificate_chain_file) \
	X(SSL_accept) \
	X(SSL_CTX_set_num_tickets) \
	X(SSL_connect) \
	X(SSL_ctrl) \
	X(SSL_free) \
	X(SSL_get0_param) \
	X(SSL_get_error) \
	X(SSL_get_verify_result) \
	X(SSL_new) \
	X(SSL_peek) \
	X(SSL_pending) \
	X(SSL_read) \
	X(SSL_set1_host) \
	X(SSL_set_fd) \
	X(SSL_write) \
	X(TLS_client_method) \
	X(TLS_server_method) \
	X(X509_VERIFY_PARAM_set1_ip_asc) \
	X(X509_verify_cert_error_string) \
	X(SHA256)

#define POINTER(name) __typeof__(&name) name; /* NOLINT(bugprone-macro-parentheses): a declaration */
static struct {
	FUNCTIONS(POINTER)
} openssl;
#undef POINTER

bool link_load(char why[POOL_WHY_BYTES])
{
	void *library = dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL); /* libcrypto comes with it */

	if (!library) {
		snprintf(why, POOL_WHY_BYTES, "a pool needs OpenSSL 3 (libssl3): %s", dlerror());
		return false;
	}
#define FIND(name)                                                            \
	*(void **)&openssl.name = dlsym(library, #name);                      \
	if (!openssl.name) {                                                  \
		snprintf(why, POOL_WHY_BYTES, "this OpenSSL has no " #name);  \
		return false;                                                 \
	}
	FUNCTIONS(FIND)
#undef FIND
	return true;
}

void link_sha256(const void *data, size_t size, unsigned char digest[SHA256_BYTES])
{
	openssl.SHA256(data, size, digest);
}

static SSL_CTX *tls, *tls_server; /* NULL: plain */

static bool complain(char why[POOL_WHY_BYTES], const char *what)
{
	unsigned long number = openssl.ERR_peek_last_error();
	const char *reason = number ? openssl.ERR_reason_error_string(number) : NULL;

	snprintf(why, POOL_WHY_BYTES, "%s: %s", what, reason ? reason : strerror(errno));
	openssl.ERR_clear_error();
	return false;
}

/* The trusted CA and this host's certificate, either end. NULL: `why`. */
static SSL_CTX *make_context(const SSL_METHOD *method, const struct pool_settings *settings, char why[POOL_WHY_BYTES])
{
	SSL_CTX *made;
	const char *wrong = NULL;

	openssl.ERR_clear_error();
	made = openssl.SSL_CTX_new(method);
	if (!made || !openssl.SSL_CTX_ctrl(made, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION, NULL))
		wrong = "TLS";
	else if (!openssl.SSL_CTX_load_verify_locations(made, settings->ca, NULL))
		wrong = settings->ca;
	else if (settings->certificate && openssl.SSL_CTX_use_certificate_chain_file(made, settings->certificate) != 1)
		wrong = settings->certificate;
	else if (settings->private_key &&
		 (openssl.SSL_CTX_use_PrivateKey_file(made, settings->private_key, SSL_FILETYPE_PEM) != 1 ||
		  openssl.SSL_CTX_check_private_key(made) != 1))
		wrong = settings->private_key;
	if (wrong) {
		openssl.SSL_CTX_free(made);
		complain(why, wrong);
		return NULL;
	}
	openssl.SSL_CTX_ctrl(made, SSL_CTRL_MODE,
			     SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
				 SSL_MODE_RELEASE_BUFFERS,
			     NULL);
	return made;
}

bool link_use_tls(const struct pool_settings *settings, char why[POOL_WHY_BYTES])
{
	SSL_CTX *client = make_context(openssl.TLS_client_method(), settings, why), *server = NULL;

	if (!client)
		return false;
	openssl.SSL_CTX_set_verify(client, SSL_VERIFY_PEER, NULL);
	if (settings->has_peers) {
		server = make_context(openssl.TLS_server_method(), settings, why);
		if (!server) {
			openssl.SSL_CTX_free(client);
			return false;
		}
		openssl.SSL_CTX_set_verify(server, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
		/* No sessions: each connection shows its certificate. */
		openssl.SSL_CTX_ctrl(server, SSL_CTRL_SET_SESS_CACHE_MODE, SSL_SESS_CACHE_OFF, NULL);
		openssl.SSL_CTX_set_num_tickets(server, 0);
	}
	tls = client;
	tls_server = server;
	return true;
}

/* ---- waiting -------------------------------------------------------------------------------- */
static int wait_for(int fd, short events, int64_t deadline_ns)
{
	struct pollfd one = {.fd = fd, .events = events};

	for (;;) {
		int64_t left_ns = deadline_ns - clock_ns(CLOCK_MONOTONIC);
		int done;

		if (left_ns <= 0)
			return -ETIMEDOUT;
		done = poll(&one, 1, (int)(left_ns / 1000000) + 1);
		if (done > 0)
			return 0;
		if (done < 0 && errno != EINTR)
			return -errno;
	}
}

/* What a call of OpenSSL that has not ended well wants; 0: call it again. */
static int wait_for_tls(const struct link *link, int result, int64_t deadline_ns)
{
	switch (openssl.SSL_get_error(link->tls, result)) {
	case SSL_ERROR_WANT_READ:
		return wait_for(link->fd, POLLIN, deadline_ns);
	case SSL_ERROR_WANT_WRITE:
		return wait_for(link->fd, POLLOUT, deadline_ns);
	default:
		return -ECONNRESET;
	}
}

/* ---- from end to end ------------------------------------------------------------------------- */
static bool shake_hands(struct link *link, const char *host, int64_t deadline_ns, char why[POOL_WHY_BYTES])
{
	unsigned char address[16];
	bool is_address = inet_pton(AF_INET, host, address) == 1 || inet_pton(AF_INET6, host, address) == 1;
	int result, err = 0;
	long verified;

	openssl.ERR_clear_error();
	link->tls = openssl.SSL_new(tls);
	if (!link->tls || !openssl.SSL_set_fd(link->tls, link->fd) ||
	    !(is_address ? openssl.X509_VERIFY_PARAM_set1_ip_asc(openssl.SSL_get0_param(link->tls), host)
			 : openssl.SSL_set1_host(link->tls, host) &&
			       openssl.SSL_ctrl(link->tls, SSL_CTRL_SET_TLSEXT_HOSTNAME, TLSEXT_NAMETYPE_host_name,
						(char *)(uintptr_t)host)))
		return complain(why, "TLS");
	while ((result = openssl.SSL_connect(link->tls)) != 1) {
		err = wait_for_tls(link, result, deadline_ns);
		if (err)
			break;
	}
	if (result == 1)
		return true;
	verified = openssl.SSL_get_verify_result(link->tls);
	if (verified != X509_V_OK) {
		snprintf(why, POOL_WHY_BYTES, "its certificate: %s", openssl.X509_verify_cert_error_string(verified));
		openssl.ERR_clear_error();
		return false;
	}
	errno = -err;
	return complain(why, "TLS");
}

int link_open(struct link *link, const struct place *to, int64_t deadline_ns, char why[POOL_WHY_BYTES])
{
	int err = 0, on = 1;
	socklen_t size = sizeof(err);

	*link = (struct link){
	    .fd = socket(to->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0),
	};
	if (link->fd < 0) {
		err = errno;
	} else if (connect(link->fd, (const struct sockaddr *)&to->address, to->length)) {
		err = errno == EINPROGRESS ? -wait_for(link->fd, POLLOUT, deadline_ns) : errno;
		if (!err && getsockopt(link->fd, SOL_SOCKET, SO_ERROR, &err, &size))
			err = errno;
	}
	if (err) {
		snprintf(why, POOL_WHY_BYTES, "connect: %s", strerror(err));
	} else {
		setsockopt(link->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
		if (!tls || shake_hands(link, to->host, deadline_ns, why))
			return 0;
		err = EPROTO;
	}
	link_close(link);
	return -err;
}

int link_accept(struct link *link, int fd, int64_t deadline_ns)
{
	int result, err = 0, on = 1;

	*link = (struct link){.fd = fd};
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	if (!tls_server)
		return 0;
	openssl.ERR_clear_error();
	link->tls = openssl.SSL_new(tls_server);
	if (!link->tls || !openssl.SSL_set_fd(link->tls, fd))
		err = -EPROTO;
	while (!err && (result = openssl.SSL_accept(link->tls)) != 1)
		err = wait_for_tls(link, result, deadline_ns);
	openssl.ERR_clear_error();
	if (err)
		link_close(link);
	return err;
}

void link_close(struct link *link)
{
	openssl.SSL_free(link->tls);
	if (link->fd >= 0)
		close(link->fd);
	*link = (struct link){.fd = -1};
}

bool link_is_quiet(const struct link *link)
{
	char one;
	int got;

	if (link->tls && openssl.SSL_pending(link->tls))
		return false;
	/* A server of TLS 1.3 sends tickets after the handshake, which answer nothing. */
	if (recv(link->fd, &one, 1, MSG_PEEK | MSG_DONTWAIT) < 0)
		return errno == EAGAIN || errno == EWOULDBLOCK;
	if (!link->tls)
		return false;
	openssl.ERR_clear_error();
	got = openssl.SSL_peek(link->tls, &one, 1);
	return got <= 0 && openssl.SSL_get_error(link->tls, got) == SSL_ERROR_WANT_READ;
}

int link_send(struct link *link, const void *data, size_t size, bool more, int64_t deadline_ns)
{
	const unsigned char *at = data;
	int err;

	while (size) {
		ssize_t sent;

		if (link->tls) {
			openssl.ERR_clear_error();
			sent = openssl.SSL_write(link->tls, at, (int)size);
			err = sent > 0 ? 0 : wait_for_tls(link, (int)sent, deadline_ns);
		} else {
			sent = send(link->fd, at, size, MSG_NOSIGNAL | (more ? MSG_MORE : 0));
			err = sent >= 0 || errno == EINTR ? 0
			      : errno == EAGAIN		  ? wait_for(link->fd, POLLOUT, deadline_ns)
							  : -errno;
		}
		if (err)
			return err;
		if (sent > 0) {
			at += sent;
			size -= (size_t)sent;
		}
	}
	return 0;
}

ssize_t link_receive(struct link *link, void *to, size_t most, int64_t deadline_ns)
{
	for (;;) {
		ssize_t got;
		int err;

		if (link->tls) {
			openssl.ERR_clear_error();
			got = openssl.SSL_read(link->tls, to, (int)most);
			err = got > 0 ? 0 : wait_for_tls(link, (int)got, deadline_ns);
		} else {
			got = recv(link->fd, to, most, 0);
			err = got > 0		? 0
			      : !got		? -ECONNRESET
			      : errno == EAGAIN ? wait_for(link->fd, POLLIN, deadline_ns)
			      : errno == EINTR	? 0
						: -errno;
		}
		if (err)
			return err;
		if (got > 0)
			return got;
	}
}
