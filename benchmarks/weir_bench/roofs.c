/* What this machine can do at most: reading memory, and fused multiply-adds in float32, with all threads. */
#include <stddef.h>

#ifndef VECTOR
#define VECTOR 32 /* bytes of a register */
#endif
extern int omp_get_num_threads(void), omp_get_thread_num(void);
typedef float vec __attribute__((vector_size(VECTOR), aligned(4)));
enum { LANES = VECTOR / 4 };

enum { BLOCK = 4 * 4096 / 4 };

/* Sums n floats (n a multiple of BLOCK), each block in S streams: some processors read several faster than one. */
static inline __attribute__((always_inline)) float read_streams(const int S, const float *p, size_t n) {
    float total = 0;
#pragma omp parallel reduction(+ : total)
    {
        size_t blocks = n / BLOCK, t = omp_get_thread_num(), all = omp_get_num_threads();
        vec s[8] = {{0}};
        for (size_t b = blocks * t / all; b < blocks * (t + 1) / all; b++)
            for (int k = 0; k < BLOCK / S; k += 8 / S * LANES)
                for (int j = 0; j < 8; j++) s[j] += *(const vec *)(p + b * BLOCK + j % S * (BLOCK / S) + k + j / S * LANES);
        for (int j = 1; j < 8; j++) s[0] += s[j];
        total += s[0][0];
    }
    return total;
}

float read_floats(const float *p, size_t n, int streams) {
    return streams == 1 ? read_streams(1, p, n) : streams == 2 ? read_streams(2, p, n) : read_streams(4, p, n);
}

/* `steps` x 12 multiply-adds of a vector, in each thread. */
float multiply_add(size_t steps) {
    float total = 0;
#pragma omp parallel reduction(+ : total)
    {
        vec a[12], x = (vec){0} + 0.999f, y = (vec){0} + 1e-4f;
        for (int j = 0; j < 12; j++) a[j] = (vec){0} + 1e-3f * j;
        for (size_t i = 0; i < steps; i++)
            _Pragma("GCC unroll 12") for (int j = 0; j < 12; j++) a[j] = a[j] * x + y;
        for (int j = 1; j < 12; j++) a[0] += a[j];
        total += a[0][0];
    }
    return total;
}

#ifdef ROOFS_MAIN /* a program of its own: seconds for each roof -> "threads bytes/s flop/s", the best pass of each */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

extern double omp_get_wtime(void);
extern int omp_get_max_threads(void);

int main(int argc, char **argv) {
    double seconds = argc > 1 ? atof(argv[1]) : 1, read = 0, fma = 0, begin, took;
    size_t bytes = (size_t)512 << 20, steps = 2000000, huge = (size_t)2 << 20;
    volatile float sink = 0; /* or the compiler sees that nobody reads the sums */
    float *data = aligned_alloc(huge, bytes);
    if (!data) return 1;
    madvise(data, bytes, MADV_HUGEPAGE); /* a roof has the machine's best pages */
#pragma omp parallel for
    for (size_t i = 0; i < bytes / 4; i++) data[i] = 1;
    int streams = 1;
    for (double end = omp_get_wtime() + seconds; omp_get_wtime() < end; streams = streams == 4 ? 1 : 2 * streams) {
        begin = omp_get_wtime();
        sink += read_floats(data, bytes / 4, streams);
        took = omp_get_wtime() - begin;
        if (bytes / took > read) read = bytes / took;
    }
    for (double end = omp_get_wtime() + seconds; omp_get_wtime() < end;) {
        begin = omp_get_wtime();
        sink += multiply_add(steps);
        took = omp_get_wtime() - begin;
        if (2.0 * 12 * LANES * steps * omp_get_max_threads() / took > fma)
            fma = 2.0 * 12 * LANES * steps * omp_get_max_threads() / took;
    }
    printf("%d %.0f %.0f\n", omp_get_max_threads(), read, fma);
    return 0;
}
#endif
