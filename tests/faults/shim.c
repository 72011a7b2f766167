/* Fails chosen system calls of the process that it is preloaded into. fault_arm says which; paths are matched by a
 * substring: the name that is given, or where the handle leads.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, READ = 2, OPEN = 4, SYNC = 8, RENAME = 16, UNLINK = 32, TRUNCATE = 64 };
static atomic_int mask, first, times, fault, seen, synced;
static char part[512];
static char syncs[1 << 16]; /* "path 0|1\n" of each call of fsync and fdatasync, 1 where it was made to fail */

/* Calls number nth to nth + times - 1 of these operations fail with errno e; -1: half of the bytes are done. */
void fault_arm(int ops, int nth, int e, int n, const char *substring) {
    atomic_store(&mask, 0);
    strncpy(part, substring, sizeof part - 1);
    atomic_store(&first, nth), atomic_store(&times, n), atomic_store(&fault, e), atomic_store(&seen, 0);
    memset(syncs, 0, sizeof syncs), atomic_store(&synced, 0);
    atomic_store(&mask, ops);
}
int fault_count(void) { return atomic_load(&seen); }
const char *fault_syncs(void) { return syncs; }

static void where(int fd, const char *name, char *path, size_t size) {
    char link[64];
    ssize_t n = 0;
    if (!name || (*name != '/' && fd >= 0)) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        n = readlink(link, path, size - 1);
        n = n < 0 ? 0 : n;
    }
    snprintf(path + n, size - n, "%s%s", n && name ? "/" : "", name ? name : "");
}
static int hit(int op, int fd, const char *name) { /* 0: go on; 1: fail, errno is set; -1: do half */
    int before = errno, e = atomic_load(&fault), result = 0;
    if (!(atomic_load(&mask) & op)) return 0;
    char path[4096];
    where(fd, name, path, sizeof path);
    if (strstr(path, part)) {
        int n = atomic_fetch_add(&seen, 1) + 1 - atomic_load(&first);
        if (n >= 0 && n < atomic_load(&times)) result = e < 0 ? -1 : 1;
    }
    errno = result == 1 ? e : before;
    return result;
}
static int sync_hit(int fd) {
    char path[4096], line[4200];
    int result = hit(SYNC, fd, NULL), e = errno;
    where(fd, NULL, path, sizeof path);
    if (strstr(path, part) && *part) {
        int n = snprintf(line, sizeof line, "%s %d\n", path, result > 0), at = atomic_fetch_add(&synced, n);
        if (at + n < (int)sizeof syncs) memcpy(syncs + at, line, n);
    }
    errno = e;
    return result > 0;
}
#define REAL(type, name, ...)                                                                                          \
    static type (*real)(__VA_ARGS__);                                                                                  \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)
#define HALF(n) (h < 0 && (n) > 1 ? (n) / 2 : (n))
#define MOVE(name, op, pointer)                                                                                        \
    ssize_t name(int fd, pointer p, size_t n) {                                                                        \
        REAL(ssize_t, name, int, pointer, size_t);                                                                     \
        int h = hit(op, fd, NULL);                                                                                     \
        return h > 0 ? -1 : real(fd, p, HALF(n));                                                                      \
    }
#define MOVE_AT(name, op, pointer)                                                                                     \
    ssize_t name(int fd, pointer p, size_t n, off_t at) {                                                              \
        REAL(ssize_t, name, int, pointer, size_t, off_t);                                                              \
        int h = hit(op, fd, NULL);                                                                                     \
        return h > 0 ? -1 : real(fd, p, HALF(n), at);                                                                  \
    }
#define MOVE_VECTOR(name, op)                                                                                          \
    ssize_t name(int fd, const struct iovec *v, int n) {                                                               \
        REAL(ssize_t, name, int, const struct iovec *, int);                                                           \
        int h = hit(op, fd, NULL);                                                                                     \
        struct iovec half = {n ? v->iov_base : NULL, n ? HALF(v->iov_len) : 0};                                        \
        return h > 0 ? -1 : h < 0 ? real(fd, &half, 1) : real(fd, v, n);                                               \
    }
MOVE(write, WRITE, const void *)
MOVE(read, READ, void *)
MOVE_AT(pwrite, WRITE, const void *)
MOVE_AT(pwrite64, WRITE, const void *)
MOVE_AT(pread, READ, void *)
MOVE_AT(pread64, READ, void *)
MOVE_VECTOR(writev, WRITE)
MOVE_VECTOR(readv, READ)

#define MODE                                                                                                           \
    va_list more;                                                                                                      \
    va_start(more, flags);                                                                                             \
    int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;                                                  \
    va_end(more)
#define OPEN_NAME(name)                                                                                                \
    int name(const char *path, int flags, ...) {                                                                       \
        MODE;                                                                                                          \
        REAL(int, name, const char *, int, ...);                                                                       \
        return hit(OPEN, -1, path) > 0 ? -1 : real(path, flags, mode);                                                 \
    }
#define OPEN_AT(name)                                                                                                  \
    int name(int fd, const char *path, int flags, ...) {                                                               \
        MODE;                                                                                                          \
        REAL(int, name, int, const char *, int, ...);                                                                  \
        return hit(OPEN, fd, path) > 0 ? -1 : real(fd, path, flags, mode);                                             \
    }
OPEN_NAME(open)
OPEN_NAME(open64)
OPEN_AT(openat)
OPEN_AT(openat64)

#define CALL(name, given, names, types, failing)                                                                       \
    int name given {                                                                                                   \
        REAL(int, name, types);                                                                                        \
        return failing > 0 ? -1 : real names;                                                                          \
    }
#define TYPES(...) __VA_ARGS__
CALL(fsync, (int fd), (fd), int, sync_hit(fd))
CALL(fdatasync, (int fd), (fd), int, sync_hit(fd))
CALL(rename, (const char *a, const char *b), (a, b), TYPES(const char *, const char *), hit(RENAME, -1, a))
CALL(renameat, (int f, const char *a, int g, const char *b), (f, a, g, b),
     TYPES(int, const char *, int, const char *), hit(RENAME, f, a))
CALL(unlink, (const char *a), (a), const char *, hit(UNLINK, -1, a))
CALL(unlinkat, (int f, const char *a, int flags), (f, a, flags), TYPES(int, const char *, int), hit(UNLINK, f, a))
CALL(ftruncate, (int fd, off_t n), (fd, n), TYPES(int, off_t), hit(TRUNCATE, fd, NULL))
CALL(ftruncate64, (int fd, off_t n), (fd, n), TYPES(int, off_t), hit(TRUNCATE, fd, NULL))
