/* Wall clocks of a process, shifted by the seconds that a file holds: LD_PRELOAD this, CLOCK_SHIFT names the file. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *shift;

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("CLOCK_SHIFT");
    int file = name ? open(name, O_RDONLY) : -1;
    if (file < 0) return;
    void *found = mmap(0, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) shift = found;
    close(file);
}

int clock_gettime(clockid_t which, struct timespec *out) {
    int status = syscall(SYS_clock_gettime, which, out);
    if (status == 0 && shift && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) out->tv_sec += *shift;
    return status;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
