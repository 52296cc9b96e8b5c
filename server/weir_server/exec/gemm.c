/* y = x · Wᵀ on CPU for few rows of x and many, W packed once: float32, or 8 bits with a scale for each 32 weights of a column.
 * Called through ctypes (exec/gemm.py); no Python, no torch. OpenMP is compiled in but not linked, see kernels.c.
 *
 * One order of sums: an element of y is a chain of multiply-adds over k = 0, 1, 2 … from zero. So a row's bits depend neither on
 * how many rows come with it, nor on its place, nor on threads; nor on the vector length, where multiply-adds are fused.
 *
 * A panel is 16 columns of y: [k][16] floats; or for each 32 k one cache line of 16 scales, then a line for each 4 k, where lane
 * j of int32 holds the 4 bytes of column j. The last panel and the last group are filled up with zeros. Panels lie end to end.
 *
 * Each thread reads its share of the panels once, in order of address, and multiplies all rows (in blocks that fit the L2 cache)
 * with a panel before it goes on. With few rows that is the speed of memory; with more, the passes over a panel that is in
 * cache leave memory idle, so each pass also fetches its part of what comes next: reading and multiplying overlap. */

#include "gemm.h"

#include <stdint.h>
#include <string.h>

extern int omp_get_num_threads(void);
extern int omp_get_thread_num(void);

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum {
    WIDTH = 16,                      /* columns of a panel */
    LINE = CACHE_LINE,               /* bytes of a cache line; of a panel's floats for one k */
    GROUP = 32,                      /* k that share a scale */
    GROUP_BYTES = LINE + GROUP * WIDTH,
    DEPTH = 2048,                    /* most k between two visits to y: what is fetched ahead, 128 KiB, fits half of L2 */
    DEPTH_Q8 = 256,                  /* the same where weights are widened into scratch: 16 KiB, half of L1 */
    AHEAD_Q8 = DEPTH_Q8 / GROUP * GROUP_BYTES, /* bytes from what is read to what is fetched */
    X_FLOATS = 1 << 16,              /* of x, for a block of rows: 256 KiB */
    LEAST_ROWS = 24, MOST_ROWS = 96, /* of a block */
    SMALL = 1 << 16,                 /* multiply-adds that are not worth a second thread */
};

typedef struct {
    int rows, rows_q8, few[2], together; /* [bits8] */
    void (*tile)(int rows, int64_t K, const float *x, int64_t ldx, const float *w, float *y, int64_t ldy, int add,
                 const char *next, int lines);
    void (*tile_q8)(int rows, int64_t K, const float *x, int64_t ldx, const int8_t *w, int64_t bytes, float *y, int64_t ldy);
    void (*tile_together[2])(int rows, int64_t K, const float *x, int64_t ldx, const void *w, int64_t bytes, float *y, int64_t ldy);
    void (*widen_panel)(int64_t groups, const int8_t *w, float *out);
} Isa;

#define NAME(x) plain_##x
#define TARGET
#define LANES 4
#define ROWS 2
#define ROWS_Q8 1
#define FEW 1
#define FEW_Q8 1
#define TOGETHER 1
#include "gemm_tile.h"

#if defined(__x86_64__)
#define NAME(x) avx2_##x
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define ROWS 6
#define ROWS_Q8 4
#define FEW 3
#define FEW_Q8 2
#define TOGETHER 2
#include "gemm_tile.h"

#define NAME(x) avx512_##x
#define TARGET __attribute__((target("avx512f")))
#define LANES 16
#define ROWS 12
#define ROWS_Q8 4
#define FEW 3
#define FEW_Q8 2
#define TOGETHER 4
#include "gemm_tile.h"

static const Isa *const isas[] = {&plain_isa, &avx2_isa, &avx512_isa};
/* What this processor can run: 0 plain C, 1 AVX2 with FMA, 2 AVX-512. Each includes those below it. */
int weir_gemm_isa(void) {
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return avx2 ? 1 + !!__builtin_cpu_supports("avx512f") : 0;
}
#else
static const Isa *const isas[] = {&plain_isa};
int weir_gemm_isa(void) { return 0; }
#endif

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ------------------------------------------------------------------------------------------------ one panel */

/* m rows against one stretch of a panel, in passes of equal height. `next` is what will be read after it. A single pass fetches
 * half of that: the processor sees its stream and brings the rest by itself (measured on Zen 3: all and none are both slower). */
static void passes(const Isa *isa, int64_t m, int64_t K, const float *x, int64_t ldx, const float *w, float *y, int64_t ldy,
                   int add, const char *next) {
    int64_t n = ceil_div(m, isa->rows), lines = !next ? 0 : n == 1 ? 4 : ceil_div(8, n);
    for (int64_t i = 0; i < n; i++) {
        int64_t r = m * i / n, end = m * (i + 1) / n;
        isa->tile((int)(end - r), K, x + r * ldx, ldx, w, y + r * ldy, ldy, add, next, i < 8 ? (int)lines : 0);
        next += K / 8 * lines * LINE;
    }
}

typedef void Panel(const Isa *isa, int64_t m, int64_t K, const float *x, int64_t ldx, const void *w, float *y, int64_t ldy);

static void panel_f32(const Isa *isa, int64_t m, int64_t K, const float *x, int64_t ldx, const void *w, float *y, int64_t ldy) {
    int64_t k = 0;
    do {
        int64_t depth = smaller(K - k, DEPTH);
        const float *here = (const float *)w + k * WIDTH;
        passes(isa, m, depth, x + k, ldx, here, y, ldy, k > 0, (const char *)(here + depth * WIDTH));
    } while ((k += DEPTH) < K);
}

static void panel_q8(const Isa *isa, int64_t m, int64_t K, const float *x, int64_t ldx, const void *w, float *y, int64_t ldy) {
    const int8_t *here = w;
    if (m <= isa->rows_q8) {
        isa->tile_q8((int)m, K, x, ldx, here, ceil_div(K, GROUP) * GROUP_BYTES, y, ldy);
        return;
    }
    float wide[DEPTH_Q8 * WIDTH] __attribute__((aligned(LINE)));
    int64_t k = 0;
    do {
        int64_t depth = smaller(K - k, DEPTH_Q8), groups = ceil_div(depth, GROUP);
        isa->widen_panel(groups, here, wide);
        here += groups * GROUP_BYTES;
        passes(isa, m, depth, x + k, ldx, wide, y, ldy, k > 0, 0);
    } while ((k += DEPTH_Q8) < K);
}

/* ------------------------------------------------------------------------------------------------ all panels */

/* `m` rows from row `row` on against panel p and those that are taken with it; the last panel, where it is narrower than 16,
 * through a copy. */
static void multiply_panel(const Product *g, Panel *panel, int64_t bytes, int64_t row, int64_t m, int64_t p, int64_t together) {
    int64_t width = smaller(g->N - p * WIDTH, together * WIDTH);
    const char *w = (const char *)g->w + p * bytes;
    const float *x = g->x + row * g->ldx, *bias = g->bias ? g->bias + p * WIDTH : 0;
    float *y = g->y + row * g->ldy + p * WIDTH, wide[MOST_ROWS * WIDTH];
    if (together > 1) {
        isas[g->isa]->tile_together[g->bits8]((int)m, g->K, x, g->ldx, w, bytes, y, g->ldy);
    } else if (width == WIDTH) {
        panel(isas[g->isa], m, g->K, x, g->ldx, w, y, g->ldy);
    } else {
        panel(isas[g->isa], m, g->K, x, g->ldx, w, wide, WIDTH);
        for (int64_t r = 0; r < m; r++) memcpy(y + r * g->ldy, wide + r * WIDTH, width * sizeof(float));
    }
    for (int64_t r = 0; bias && r < m; r++)
        for (int64_t j = 0; j < width; j++) y[r * g->ldy + j] += bias[j];
}

/* A thread takes the panels of its own share in order, for one block of rows after the other; then what is left of the others':
 * one that shares its core with another process does not keep the rest waiting. Few rows take several panels at once, but for what is
 * left at the end of a share and for a narrow last panel: an element's chain of multiply-adds takes longer than memory does, and
 * several streams are read faster than one. */
void weir_product_share(const Product *g, Share *shares, int threads, int self) {
    Panel *panel = g->bits8 ? panel_q8 : panel_f32;
    int64_t bytes = g->bits8 ? ceil_div(g->K, GROUP) * GROUP_BYTES : g->K * LINE;
    int64_t panels = ceil_div(g->N, WIDTH), block = X_FLOATS / (g->K + 1);
    int64_t most = g->M <= isas[g->isa]->few[g->bits8] ? isas[g->isa]->together : 1;
    block = smaller(block < LEAST_ROWS ? LEAST_ROWS : block, MOST_ROWS);
    for (int i = 0; i < threads; i++) {
        int owner = (self + i) % threads;
        int64_t first = panels * owner / threads, own = panels * (owner + 1) / threads - first, n;
        int64_t units = ceil_div(own, most), all = units * ceil_div(g->M, block);
        while ((n = __atomic_fetch_add(&shares[owner].taken, 1, __ATOMIC_RELAXED)) < all) {
            int64_t row = n / units * block, p = first + n % units * most, end = smaller(p + most, first + own);
            int64_t together = end - p == most && end * WIDTH <= g->N ? most : 1;
            for (; p < end; p += together) multiply_panel(g, panel, bytes, row, smaller(g->M - row, block), p, together);
        }
    }
}

static void multiply(const Product *g) {
    Share shares[MOST_THREADS] = {{0}};
#pragma omp parallel if (g->M * g->N * g->K > SMALL)
    {
        int threads = omp_get_num_threads(), self = omp_get_thread_num();
        if (threads > MOST_THREADS) threads = MOST_THREADS;
        if (self < threads) weir_product_share(g, shares, threads, self);
    }
}

int64_t weir_gemm_bytes(int64_t N, int64_t K) { return ceil_div(N, WIDTH) * K * LINE; }
int64_t weir_gemm_q8_bytes(int64_t N, int64_t K) { return ceil_div(N, WIDTH) * ceil_div(K, GROUP) * GROUP_BYTES; }

/* y [M][N] = x [M][K] · Wᵀ; ldx and ldy floats from row to row; `isa` at most weir_gemm_isa(). */
void weir_gemm(int isa, int64_t M, int64_t N, int64_t K, const float *x, int64_t ldx, const void *w, float *y, int64_t ldy) {
    multiply(&(Product){isa, 0, M, N, K, x, ldx, w, 0, y, ldy});
}

void weir_gemm_q8(int isa, int64_t M, int64_t N, int64_t K, const float *x, int64_t ldx, const void *w, float *y, int64_t ldy) {
    multiply(&(Product){isa, 1, M, N, K, x, ldx, w, 0, y, ldy});
}

/* ------------------------------------------------------------------------------------------------ packing */

/* W [N][K] into panels of float32. Those of 8 bits are made by model/int8.py. */
void weir_gemm_pack(int64_t N, int64_t K, const float *w, float *out) {
#pragma omp parallel for if (N * K > SMALL)
    for (int64_t p = 0; p < ceil_div(N, WIDTH); p++)
        for (int64_t k = 0; k < K; k++)
            for (int64_t j = 0; j < WIDTH; j++)
                out[(p * K + k) * WIDTH + j] = p * WIDTH + j < N ? w[(p * WIDTH + j) * K + k] : 0;
}
