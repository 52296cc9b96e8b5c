/* What program.c needs of gemm.c: a product whose work many threads share. */
#ifndef WEIR_GEMM_H
#define WEIR_GEMM_H

#include <stdint.h>

enum { MOST_THREADS = 64, CACHE_LINE = 64 };

/* y [M][N] = x [M][K] · Wᵀ (+ bias [N], where it is not NULL); ldx and ldy are floats from row to row. */
typedef struct {
    int isa, bits8;
    int64_t M, N, K;
    const float *x;
    int64_t ldx;
    const void *w;
    const float *bias;
    float *y;
    int64_t ldy;
} Product;

/* How much of a thread's share is taken; zero when a product begins. */
typedef struct {
    int64_t taken;
    char apart[CACHE_LINE - sizeof(int64_t)];
} Share;

/* What thread `self` of `threads` does of a product: all of them call it with the same `shares`, and the product is ready when
 * all of them have returned. */
void weir_product_share(const Product *product, Share *shares, int threads, int self);

#endif
