/* The small operations of a decoder step on CPU, float32: RMSNorm with residual, gated product, rotary embedding, KV append and
 * paged grouped-query attention, over all positions or a window. Called by program.c; no Python, no torch.
 *
 * One reduction order: a query's result is the same bits whether it comes as a decode row, in a prefill chunk of any size, or
 * beside any neighbours. Every sum runs over features or over positions in ascending order.
 *
 * OpenMP is compiled in but not linked: the GOMP_* symbols are torch's, so that the process has one pool of threads.
 * Softmax is in two passes, not online: the scores of a tile's queries fit the L2 cache. Layout of pages: exec/pool.py. */

#include "kernels.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define LOWEST -3.0e38f

enum { AHEAD = 2, STREAMS = 2 }; /* pieces from what is read to what is fetched; read at once, of as many heads */

/* Keys of a head on the page of positions index · page …; its values lie `half` numbers further. */
INLINE char *page_of(const Attention *a, int size, const int64_t *table, int index, int head) {
    return a->pool + (table[index] + (int64_t)head * a->dim * a->page) * size;
}

/* What a tile's queries read: keys of `positions` positions from `base` (a multiple of TILE) on, then their values, in pieces of
 * TILE positions of one head, in each page head after head as they lie. `pieces`: of the keys. */
typedef struct {
    const Attention *a;
    const int64_t *table;
    int head, heads, base, positions, pieces;
    int apart; /* numbers from a head's queries to the next one's */
} Reading;

/* Keys or values of TILE positions of a row: head_dim times TILE numbers, `stride` bytes apart. */
typedef struct {
    const char *at;
    int64_t stride;
} Piece;

/* Piece i in the order of reading, or the last one. */
INLINE Piece piece(const Reading *r, int size, int i) {
    if (i >= 2 * r->pieces) i = 2 * r->pieces - 1;
    int of_values = i >= r->pieces;
    i -= of_values * r->pieces;
    int j = r->base + i / r->heads * TILE, slot = j % r->a->page;
    const char *page = page_of(r->a, size, r->table, j / r->a->page, r->head + i % r->heads);
    if (of_values) return (Piece){page + (r->a->half + (int64_t)slot * r->a->dim) * size, TILE * size};
    return (Piece){page + slot * size, (int64_t)r->a->page * size};
}

/* The nearest bfloat16, of two as near the even one; what is no number stays none. */
INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* n numbers into the pool, `step` numbers apart. */
INLINE void put(char *pool, int bf16, int step, const float *x, int n) {
    for (int i = 0; i < n; i++) {
        if (bf16) ((uint16_t *)pool)[i * step] = to_bf16(x[i]);
        else ((float *)pool)[i * step] = x[i];
    }
}

INLINE void rotate(float *x, const float *cos, const float *sin, int half, float scale) {
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = (a * cos[i] - b * sin[i]) * scale;
        x[i + half] = (b * cos[i] + a * sin[i]) * scale;
    }
}

#define NAME(x) plain_##x
#define TARGET
#define LANES 4
#include "kernels_isa.h"

#if defined(__x86_64__)
#define NAME(x) avx2_##x
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#include "kernels_isa.h"

#define NAME(x) avx512_##x
#define TARGET __attribute__((target("avx512f")))
#define LANES 16
#include "kernels_isa.h"
#endif

const Kernels *weir_kernels = &plain_kernels;

/* Use the best instruction set of this processor up to `most`: 0 plain C, 1 AVX2 with FMA, 2 AVX-512. Returns the one in use. */
int weir_select(int most) {
#if defined(__x86_64__)
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (most >= 2 && avx2 && __builtin_cpu_supports("avx512f")) return weir_kernels = &avx512_kernels, 2;
    if (most >= 1 && avx2) return weir_kernels = &avx2_kernels, 1;
#endif
    (void)most;
    return weir_kernels = &plain_kernels, 0;
}

/* ------------------------------------------------------------------------------------------------ what is called */

void weir_attend_tile(const Attention *a, const float *qkv, float *out, int t, int count, int head, int heads, float *scores) {
    Queries queries;
    int n = 0, group = a->heads / a->kv_heads;
    const int64_t *table = a->tables + (int64_t)a->row_of[t] * a->table_width;
    for (int i = 0; i < count * group; i++) {
        int token = t + i / group, h = head * group + i % group, last = a->positions[token];
        queries.q[n] = qkv + ((int64_t)token * (a->heads + 2 * a->kv_heads) + h) * a->dim;
        queries.out[n] = out + ((int64_t)token * a->heads + h) * a->dim;
        queries.first[n] = a->window && last >= a->window ? last - a->window + 1 : 0;
        queries.last[n++] = last;
        if (n == MAX_QUERIES || i + 1 == count * group) {
            weir_kernels->attend(n, a, table, head, heads, &queries, scores);
            n = 0;
        }
    }
}

int weir_max_queries(void) { return MAX_QUERIES; }
int weir_most_heads(void) { return MOST_HEADS; }
