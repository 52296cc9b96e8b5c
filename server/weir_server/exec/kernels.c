/* The small operations of a decoder step on CPU, float32: RMSNorm with residual, gated product, rotary embedding, KV append and
 * paged grouped-query attention, over all positions or a window. Called through ctypes (exec/cpu.py); no Python, no torch.
 *
 * One reduction order: a query's result is the same bits whether it comes as a decode row, in a prefill chunk of any size, or
 * beside any neighbours. Every sum runs over features or over positions in ascending order.
 *
 * OpenMP is compiled in but not linked: the GOMP_* symbols are torch's, so that the process has one pool of threads.
 * Softmax is in two passes, not online: the scores of a tile's queries fit the L2 cache. Layout of pages: exec/pool.py. */

#include <stdint.h>
#include <string.h>

extern int omp_get_thread_num(void);

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define LOWEST -3.0e38f

enum {
    TILE = 16,       /* keys scored, or features summed, at a time: divides page size and head_dim */
    MAX_QUERIES = 6, /* that share a pass over keys: with AVX2 their sums fill 12 of 16 registers */
    SMALL = 1 << 15, /* elements that are not worth a second thread */
};

typedef struct {
    float *pool;              /* this layer's page in block 0 */
    int64_t half;             /* floats from K to V */
    int heads, kv_heads, dim, page;
    int window;               /* positions that a query sees, its own included; 0 = all before it */
    int table_width;
    float scale, eps;         /* of the scores; of the norms of q and k */
    const int32_t *positions; /* [tokens] */
    const int32_t *row_of;    /* [tokens] */
    const int64_t *tables;    /* [rows][table_width]: floats from block 0 to the block of positions i page … */
    const float *cos, *sin;   /* [context][dim / 2] */
    const float *q_norm, *k_norm; /* [dim], or NULL: heads are not normalised */
    int64_t scratch_stride;   /* floats of scratch for each thread */
    float *scratch;
} Attention;

/* N queries of one row that share a KV head, in order of position; query n sees positions first[n] … last[n]. */
typedef struct {
    const float *q[MAX_QUERIES];
    float *out[MAX_QUERIES];
    int first[MAX_QUERIES], last[MAX_QUERIES];
} Queries;

typedef struct {
    void (*rms_norm_row)(const float *x, float *residual, const float *weight, float *out, int n, float eps);
    void (*gated_row)(const float *gate, const float *up, float *out, int n, int gelu);
    void (*append_token)(const Attention *a, float *qkv, int t);
    void (*attend)(int N, const Attention *a, const int64_t *table, int head, const Queries *queries, float *scores);
} Kernels;

INLINE float *page_of(const Attention *a, const int64_t *table, int index, int head) {
    return a->pool + table[index] + (int64_t)head * a->dim * a->page;
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

static const Kernels *kernels = &plain_kernels;

/* Use the best instruction set of this processor up to `most`: 0 plain C, 1 AVX2 with FMA, 2 AVX-512. Returns the one in use. */
int weir_select(int most) {
#if defined(__x86_64__)
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (most >= 2 && avx2 && __builtin_cpu_supports("avx512f")) return kernels = &avx512_kernels, 2;
    if (most >= 1 && avx2) return kernels = &avx2_kernels, 1;
#endif
    (void)most;
    return kernels = &plain_kernels, 0;
}

/* ------------------------------------------------------------------------------------------------ what is called */

void weir_add_rms_norm(const float *x, float *residual, const float *weight, float *out, int rows, int n, float eps) {
#pragma omp parallel for if ((int64_t)rows * n > SMALL)
    for (int r = 0; r < rows; r++) {
        int64_t at = (int64_t)r * n;
        kernels->rms_norm_row(x ? x + at : 0, residual + at, weight, out + at, n, eps);
    }
}

void weir_gated(const float *gate_up, float *out, int rows, int n, int gelu) {
#pragma omp parallel for if ((int64_t)rows * n > SMALL)
    for (int r = 0; r < rows; r++) {
        const float *gate = gate_up + (int64_t)r * 2 * n;
        kernels->gated_row(gate, gate + n, out + (int64_t)r * n, n, gelu);
    }
}

/* One tile: `count` consecutive tokens of one row from token t on, all query heads of KV head `head`. */
static void attend_tile(const Attention *a, const float *qkv, float *out, int t, int count, int head, float *scores) {
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
            kernels->attend(n, a, table, head, &queries, scores);
            n = 0;
        }
    }
}

int weir_max_queries(void) { return MAX_QUERIES; }
int weir_attention_bytes(void) { return sizeof(Attention); } /* whoever calls with another struct is of another build */

/* `tiles` [n_tiles][2]: first token and number of tokens, of one row each. `work`: multiply-adds, decides about threads. */
void weir_attention(const Attention *a, float *qkv, float *out, int tokens, const int32_t *tiles, int n_tiles, int64_t work) {
    int units = n_tiles * a->kv_heads;
#pragma omp parallel if (work > 8 * SMALL)
    {
#pragma omp for
        for (int t = 0; t < tokens; t++) kernels->append_token(a, qkv, t);
#pragma omp for schedule(dynamic, 1)
        for (int u = 0; u < units; u++) {
            const int32_t *tile = tiles + 2 * (u % n_tiles);
            attend_tile(a, qkv, out, tile[0], tile[1], u / n_tiles, a->scratch + omp_get_thread_num() * a->scratch_stride);
        }
    }
}
