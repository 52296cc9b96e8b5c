/* The small operations of a decoder step on CPU, float32: RMSNorm with residual, SiLU-gated product, rotary embedding, KV
 * append and paged grouped-query attention. Called through ctypes (exec/cpu.py); no Python, no torch.
 *
 * One reduction order: a query's result is the same bits whether it comes as a decode row, in a prefill chunk of any size, or
 * beside any neighbours. Every sum runs over features or over positions in ascending order, in 16 lanes or one.
 *
 * OpenMP is compiled in but not linked: the GOMP_* symbols are torch's, so that the process has one pool of threads.
 * Softmax is in two passes, not online: the scores of a tile's queries fit the L2 cache. Layout of pages: exec/pool.py. */

#include <stdint.h>
#include <string.h>

extern int omp_get_thread_num(void);

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16, MAX_QUERIES = 6, SMALL = 1 << 15 };
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }
INLINE vec larger(vec a, vec b) { ivec m = a > b; return (vec)(((ivec)a & m) | ((ivec)b & ~m)); }

INLINE float sum_lanes(vec v) {
    float s = 0;
    for (int i = 0; i < LANES; i++) s += v[i];
    return s;
}

/* exp for x <= 88, to about 1 ulp: x = n ln2 + r, polynomial in r (Cephes expf). */
INLINE vec exp_lanes(vec x) {
    x = larger(x, splat(-87.0f));
    vec n = x * 1.44269504088896341f + splat(12582912.0f); /* 1.5 * 2^23: rounds to nearest */
    ivec e = (ivec)n << 23;
    n -= splat(12582912.0f);
    vec r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (vec)((ivec)p + e);
}

/* ------------------------------------------------------------------------------------------------ RMSNorm, SiLU */

INLINE void rms_norm_row(const float *x, float *residual, const float *weight, float *out, int n, float eps) {
    vec squares = {0};
    for (int i = 0; i < n; i += LANES) {
        vec v = load(residual + i);
        if (x) store(residual + i, v += load(x + i));
        squares += v * v;
    }
    float scale = 1.0f / __builtin_sqrtf(sum_lanes(squares) / n + eps);
    for (int i = 0; i < n; i += LANES) store(out + i, load(residual + i) * scale * load(weight + i));
}

INLINE void silu_mul_row(const float *gate, const float *up, float *out, int n) {
    for (int i = 0; i < n; i += LANES) {
        vec g = load(gate + i);
        store(out + i, g / (exp_lanes(-g) + 1.0f) * load(up + i));
    }
}

/* ------------------------------------------------------------------------------------------------ attention */

typedef struct {
    float *pool;             /* start of this layer in chunk 0 */
    int64_t chunk;           /* floats from one chunk to the next */
    int64_t half;            /* floats from K to V */
    int heads, kv_heads, dim, page, table_width;
    const int32_t *positions; /* [tokens] */
    const int32_t *row_of;    /* [tokens] */
    const int32_t *tables;    /* [rows][table_width] */
    const float *cos, *sin;   /* [context][dim / 2] */
    int64_t scratch_stride;   /* floats of scratch for each thread */
    float *scratch;
} Attention;

INLINE float *page_of(const Attention *a, const int32_t *table, int index, int head) {
    return a->pool + table[index] * a->chunk + (int64_t)head * a->dim * a->page;
}

INLINE void rotate(float *x, const float *cos, const float *sin, int half, float scale) {
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = (a * cos[i] - b * sin[i]) * scale;
        x[i + half] = (b * cos[i] + a * sin[i]) * scale;
    }
}

/* Rotate a token's queries (scaled by dim^-1/2) and keys in place, and put keys and values into their page. */
INLINE void append_token(const Attention *a, float *qkv, int t) {
    int half = a->dim / 2, position = a->positions[t], slot = position % a->page;
    const int32_t *table = a->tables + (int64_t)a->row_of[t] * a->table_width;
    const float *cos = a->cos + (int64_t)position * half, *sin = a->sin + (int64_t)position * half;
    float *q = qkv + (int64_t)t * (a->heads + 2 * a->kv_heads) * a->dim, *k = q + a->heads * a->dim;
    float scale = 1.0f / __builtin_sqrtf(a->dim);
    for (int h = 0; h < a->heads; h++) rotate(q + h * a->dim, cos, sin, half, scale);
    for (int h = 0; h < a->kv_heads; h++, k += a->dim) {
        rotate(k, cos, sin, half, 1.0f);
        float *keys = page_of(a, table, position / a->page, h);
        for (int d = 0; d < a->dim; d++) keys[d * a->page + slot] = k[d];
        memcpy(keys + a->half + slot * a->dim, k + a->kv_heads * a->dim, a->dim * sizeof(float));
    }
}

/* Scores of N queries against 16 keys that lie across: s[n] = sum over d of q[n][d] k[d][.] */
INLINE void score_keys(int N, const float *const *q, const float *keys, int page, int dim, float *scores, int64_t stride) {
    vec s[MAX_QUERIES] = {{0}};
    for (int d = 0; d < dim; d++) {
        vec k = load(keys + d * page);
        for (int n = 0; n < N; n++) s[n] += k * q[n][d];
    }
    for (int n = 0; n < N; n++) store(scores + n * stride, s[n]);
}

/* out[n][16 features] += sum over `count` keys of p[n][key] v[key] */
INLINE void add_values(int N, const float *p, int64_t stride, const float *values, int dim, int count, float (*out)[LANES]) {
    vec o[MAX_QUERIES];
    for (int n = 0; n < N; n++) o[n] = load(out[n]);
    for (int j = 0; j < count; j++) {
        vec v = load(values + j * dim);
        for (int n = 0; n < N; n++) o[n] += v * p[n * stride + j];
    }
    for (int n = 0; n < N; n++) store(out[n], o[n]);
}

/* scores[0 … length) → exp(score - max), zeros up to `padded`; returns 1 / sum. */
INLINE float soften(float *scores, int length, int padded) {
    for (int j = length; j < padded; j++) scores[j] = -3.0e38f;
    vec top = splat(-3.0e38f), total = {0};
    for (int j = 0; j < padded; j += LANES) top = larger(load(scores + j), top);
    float most = top[0];
    for (int i = 1; i < LANES; i++) most = top[i] > most ? top[i] : most;
    for (int j = 0; j < padded; j += LANES) {
        vec e = exp_lanes(load(scores + j) - most);
        store(scores + j, e);
    }
    for (int j = length; j < padded; j++) scores[j] = 0;
    for (int j = 0; j < padded; j += LANES) total += load(scores + j);
    return 1.0f / sum_lanes(total);
}

/* `N` queries of one row that share a KV head; lengths[n] positions are seen by query n, `longest` by any. */
INLINE void attend_n(int N, const Attention *a, const int32_t *table, int head, const float *const *q, const int *lengths,
                     int longest, float *const *out, float *scores) {
    int64_t stride = a->scratch_stride / MAX_QUERIES;
    int padded = (longest + LANES - 1) / LANES * LANES;
    for (int j = 0; j < longest; j += LANES)
        score_keys(N, q, page_of(a, table, j / a->page, head) + j % a->page, a->page, a->dim, scores + j, stride);
    float inverse[MAX_QUERIES];
    for (int n = 0; n < N; n++) inverse[n] = soften(scores + n * stride, lengths[n], padded);
    for (int d = 0; d < a->dim; d += LANES) {
        float sum[MAX_QUERIES][LANES];
        memset(sum, 0, sizeof sum);
        for (int j = 0; j < longest; j += a->page) {
            int count = longest - j < a->page ? longest - j : a->page;
            const float *values = page_of(a, table, j / a->page, head) + a->half + d;
            add_values(N, scores + j, stride, values, a->dim, count, sum);
        }
        for (int n = 0; n < N; n++) store(out[n] + d, load(sum[n]) * inverse[n]);
    }
}

INLINE void attend(int N, const Attention *a, const int32_t *table, int head, const float *const *q,
                          const int *lengths, int longest, float *const *out, float *scores) {
    switch (N) {
    case 1: attend_n(1, a, table, head, q, lengths, longest, out, scores); break;
    case 2: attend_n(2, a, table, head, q, lengths, longest, out, scores); break;
    case 3: attend_n(3, a, table, head, q, lengths, longest, out, scores); break;
    case 4: attend_n(4, a, table, head, q, lengths, longest, out, scores); break;
    case 5: attend_n(5, a, table, head, q, lengths, longest, out, scores); break;
    default: attend_n(6, a, table, head, q, lengths, longest, out, scores); break;
    }
}

/* ------------------------------------------------------------------------------------------------ instruction sets */

typedef struct {
    void (*rms_norm_row)(const float *x, float *residual, const float *weight, float *out, int n, float eps);
    void (*silu_mul_row)(const float *gate, const float *up, float *out, int n);
    void (*append_token)(const Attention *a, float *qkv, int t);
    void (*attend)(int N, const Attention *a, const int32_t *table, int head, const float *const *q, const int *lengths,
                   int longest, float *const *out, float *scores);
} Kernels;

/* The functions above, compiled once more for another instruction set. */
#define COMPILE(set, attribute)                                                                                           \
    attribute static void rms_norm_row_##set(const float *x, float *residual, const float *weight, float *out, int n,     \
                                             float eps) { rms_norm_row(x, residual, weight, out, n, eps); }               \
    attribute static void silu_mul_row_##set(const float *gate, const float *up, float *out, int n) {                     \
        silu_mul_row(gate, up, out, n);                                                                                   \
    }                                                                                                                     \
    attribute static void append_token_##set(const Attention *a, float *qkv, int t) { append_token(a, qkv, t); }          \
    attribute static void attend_##set(int N, const Attention *a, const int32_t *table, int head, const float *const *q,  \
                                       const int *lengths, int longest, float *const *out, float *scores) {               \
        attend(N, a, table, head, q, lengths, longest, out, scores);                                                      \
    }                                                                                                                     \
    static const Kernels set = {rms_norm_row_##set, silu_mul_row_##set, append_token_##set, attend_##set};

COMPILE(baseline, __attribute__((unused)))
#if defined(__x86_64__)
COMPILE(avx2, __attribute__((target("arch=x86-64-v3"))))
COMPILE(avx512, __attribute__((target("arch=x86-64-v4"))))
#endif

static const Kernels *kernels = &baseline;

/* Use the best instruction set of this machine up to `most`: 0 any machine's, 1 AVX2, 2 AVX-512. Returns the one in use. */
int weir_select(int most) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (most >= 2 && __builtin_cpu_supports("x86-64-v4")) return kernels = &avx512, 2;
    if (most >= 1 && __builtin_cpu_supports("x86-64-v3")) return kernels = &avx2, 1;
#endif
    return kernels = &baseline, 0;
}

/* ------------------------------------------------------------------------------------------------ what is called */

void weir_add_rms_norm(const float *x, float *residual, const float *weight, float *out, int rows, int n, float eps) {
#pragma omp parallel for if ((int64_t)rows * n > SMALL)
    for (int r = 0; r < rows; r++) {
        int64_t at = (int64_t)r * n;
        kernels->rms_norm_row(x ? x + at : 0, residual + at, weight, out + at, n, eps);
    }
}

void weir_silu_mul(const float *gate_up, float *out, int rows, int n) {
#pragma omp parallel for if ((int64_t)rows * n > SMALL)
    for (int r = 0; r < rows; r++) {
        const float *gate = gate_up + (int64_t)r * 2 * n;
        kernels->silu_mul_row(gate, gate + n, out + (int64_t)r * n, n);
    }
}

/* One tile: `count` consecutive tokens of one row from token t on, all query heads of KV head `head`. */
static void attend_tile(const Attention *a, const float *qkv, float *out, int t, int count, int head, float *scores) {
    const float *q[MAX_QUERIES];
    float *o[MAX_QUERIES];
    int lengths[MAX_QUERIES], n = 0, group = a->heads / a->kv_heads;
    const int32_t *table = a->tables + (int64_t)a->row_of[t] * a->table_width;
    for (int i = 0; i < count * group; i++) {
        int token = t + i / group, h = head * group + i % group;
        q[n] = qkv + ((int64_t)token * (a->heads + 2 * a->kv_heads) + h) * a->dim;
        o[n] = out + ((int64_t)token * a->heads + h) * a->dim;
        lengths[n++] = a->positions[token] + 1;
        if (n == MAX_QUERIES || i + 1 == count * group) {
            kernels->attend(n, a, table, head, q, lengths, lengths[n - 1], o, scores);
            n = 0;
        }
    }
}

int weir_max_queries(void) { return MAX_QUERIES; }

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
