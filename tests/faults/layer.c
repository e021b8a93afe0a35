/* Preloaded into a process: of its calls on files below a folder, the n-th fails, finds the disk full, or is its last; and the clock may jump there.
   Compiled by struck.py. What is to happen is said by `plan`, in a process that was forked, or by the variable FAULT of one that was started. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { NOTHING, FAIL, FULL, KILL, JUMP };
enum { READS, WRITES };
static int what, number;
static long at, lasts, jump, calls;
static char under[4096], mark[4096];

#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); real; })

void plan(const char *folder, const char *marked, int kind, long nth, int error, long calls_long, long seconds) {
    snprintf(under, sizeof under, "%s", folder);
    snprintf(mark, sizeof mark, "%s", marked);
    at = nth, number = error, lasts = calls_long, jump = seconds, calls = 0, what = kind;
}

long counted(void) { return calls; }

__attribute__((constructor)) static void from_variable(void) {
    const char *said = getenv("FAULT");
    char folder[4096], marked[4096];
    int kind, error;
    long nth, calls_long, seconds;
    if (said && sscanf(said, "%d %ld %d %ld %ld %4095s %4095s", &kind, &nth, &error, &calls_long, &seconds, folder, marked) == 7)
        plan(folder, marked, kind, nth, error, calls_long, seconds);
}

static void leave_mark(void) {
    int saved = errno, file = REAL(open)(mark, O_CREAT | O_WRONLY, 0600);
    if (file >= 0) close(file);
    errno = saved;
}

/* Whether this call is to fail; errno is then set. */
static int strikes(const char *path, int kind) {
    if (!*under || !path || strncmp(path, under, strlen(under))) return 0;
    long now = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (what == NOTHING || now < at) return 0;
    if (what == KILL && now == at) { leave_mark(); kill(getpid(), SIGKILL); pause(); }
    if (what == JUMP && now == at) leave_mark();
    if ((what == FAIL && now == at) || (what == FULL && kind == WRITES && now < at + lasts)) {
        leave_mark();
        errno = what == FULL ? ENOSPC : number;
        return 1;
    }
    return 0;
}

static int strikes_file(int file, int kind) {
    if (!*under) return 0;
    char link[32], path[4096];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (length < 0) return 0;
    path[length] = 0;
    return strikes(path, kind);
}

#define OPEN(name)                                                                             \
    int name(const char *path, int flags, ...) {                                               \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        return strikes(path, flags & O_CREAT ? WRITES : READS) ? -1 : REAL(name)(path, flags, mode); \
    }
#define OPENAT(name)                                                                           \
    int name(int folder, const char *path, int flags, ...) {                                   \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        return strikes(path, flags & O_CREAT ? WRITES : READS) ? -1 : REAL(name)(folder, path, flags, mode); \
    }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

ssize_t read(int file, void *data, size_t size) { return strikes_file(file, READS) ? -1 : REAL(read)(file, data, size); }
ssize_t pread64(int file, void *data, size_t size, off64_t from) { return strikes_file(file, READS) ? -1 : REAL(pread64)(file, data, size, from); }
ssize_t write(int file, const void *data, size_t size) {
    if (!strikes_file(file, WRITES)) return REAL(write)(file, data, size);
    return what == FULL && size > 1 && calls % 2 ? REAL(write)(file, data, size / 2) : -1; /* sometimes a part still finds room */
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t to) { return strikes_file(file, WRITES) ? -1 : REAL(pwrite64)(file, data, size, to); }
int fsync(int file) { return strikes_file(file, WRITES) ? -1 : REAL(fsync)(file); }
int fdatasync(int file) { return strikes_file(file, WRITES) ? -1 : REAL(fdatasync)(file); }
int ftruncate64(int file, off64_t size) { return strikes_file(file, WRITES) ? -1 : REAL(ftruncate64)(file, size); }
int rename(const char *from, const char *to) { return strikes(to, READS) ? -1 : REAL(rename)(from, to); }
int link(const char *from, const char *to) { return strikes(to, WRITES) ? -1 : REAL(link)(from, to); }
int symlink(const char *from, const char *to) { return strikes(to, WRITES) ? -1 : REAL(symlink)(from, to); }
int unlink(const char *path) { return strikes(path, READS) ? -1 : REAL(unlink)(path); }
int mkdir(const char *path, mode_t mode) { return strikes(path, WRITES) ? -1 : REAL(mkdir)(path, mode); }

static long jumped(void) { return what == JUMP && __atomic_load_n(&calls, __ATOMIC_SEQ_CST) >= at ? jump : 0; }
int clock_gettime(clockid_t clock, struct timespec *told) {
    int done = REAL(clock_gettime)(clock, told);
    if (!done && clock == CLOCK_REALTIME) told->tv_sec += jumped();
    return done;
}
time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *told, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    told->tv_sec = now.tv_sec, told->tv_usec = now.tv_nsec / 1000;
    return 0;
}
