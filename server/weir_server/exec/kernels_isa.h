/* The inner loops of kernels.c, included once for each instruction set with these defined: NAME(x), TARGET (attribute), LANES
 * (floats of a vector; a divisor of TILE). */

enum { NAME(PARTS) = TILE / LANES };
typedef float NAME(vec) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t NAME(ints) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t NAME(shorts) __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t NAME(words) __attribute__((vector_size(4 * LANES)));
#define vec NAME(vec)
#define ints NAME(ints)
#define load(p) (*(const vec *)(p))
#define store(p, v) (*(vec *)(p) = (v))
#define SIZE (bf16 ? (int)sizeof(uint16_t) : (int)sizeof(float))
#define EACH_PART UNROLL for (int i = 0; i < NAME(PARTS); i++)
#define EACH_QUERY UNROLL for (int n = 0; n < N; n++)
#define EACH_HEAD UNROLL for (int h = 0; h < S; h++)

/* LANES numbers of the pool. */
TARGET INLINE vec NAME(take)(const int bf16, const char *p) {
    return bf16 ? (vec)(__builtin_convertvector(*(const NAME(shorts) *)p, NAME(words)) << 16) : *(const vec *)p;
}

TARGET INLINE vec NAME(larger)(vec a, vec b) {
    ints m = a > b;
    return (vec)(((ints)a & m) | ((ints)b & ~m));
}

TARGET INLINE float NAME(sum)(vec v) {
    float s = 0;
    for (int i = 0; i < LANES; i++) s += v[i];
    return s;
}

/* exp for -87 <= x <= 88 (what is below counts as -87), to about 1 ulp: x = n ln2 + r, polynomial in r (Cephes expf). */
TARGET INLINE vec NAME(exp)(vec x) {
    const vec zero = {0}, round = zero + 12582912.0f; /* 1.5 * 2^23: adding it rounds to the nearest integer */
    x = NAME(larger)(x, zero - 87.0f);
    vec n = x * 1.44269504088896341f + round;
    ints e = (ints)n << 23;
    n -= round;
    vec r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vec p = zero + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (vec)((ints)p + e);
}

/* ------------------------------------------------------------------------------------------------ RMSNorm, gates */

TARGET static void NAME(rms_norm_row)(const float *x, float *residual, const float *weight, float *out, int n, float eps) {
    vec squares = {0};
    for (int i = 0; i < n; i += LANES) {
        vec v = load(residual + i);
        if (x) store(residual + i, v += load(x + i));
        squares += v * v;
    }
    float scale = 1.0f / __builtin_sqrtf(NAME(sum)(squares) / n + eps);
    for (int i = 0; i < n; i += LANES) store(out + i, load(residual + i) * scale * load(weight + i));
}

/* silu(g) = g / (1 + exp(-g)); gelu by tanh(u), u = sqrt(2/pi) (g + 0.044715 g^3), is g / (1 + exp(-2u)). */
TARGET static void NAME(gated_row)(const float *gate, const float *up, float *out, int n, int gelu) {
    const vec most = (vec){0} + 88.0f;
    for (int i = 0; i < n; i += LANES) {
        vec g = load(gate + i), x = -g;
        if (gelu) x = g * (g * g * -0.0713548163f - 1.5957691216f);
        store(out + i, g / (NAME(exp)(-NAME(larger)(-x, -most)) + 1.0f) * load(up + i));
    }
}

/* tanh(u) = 1 - 2 / (exp(2u) + 1), with exp kept from overflowing where that is 1 anyway. x - x: what is not finite stays so. */
TARGET INLINE vec NAME(capped)(vec x, float cap) {
    const vec most = (vec){0} + 86.0f;
    vec e = NAME(exp)(-NAME(larger)(x * (-2.0f / cap), -most));
    return (1.0f - 2.0f / (e + 1.0f)) * cap + (x - x);
}

TARGET static void NAME(capped_row)(float *x, int n, float cap) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(x + i, NAME(capped)(load(x + i), cap));
    float rest[LANES] = {0};
    memcpy(rest, x + i, (n - i) * sizeof(float));
    store(rest, NAME(capped)(load(rest), cap));
    memcpy(x + i, rest, (n - i) * sizeof(float));
}

/* ------------------------------------------------------------------------------------------------ attention */

/* Normalise and rotate a token's queries (scaled) and keys in place, and put keys and values into their page. */
TARGET static void NAME(append_token)(const Attention *a, float *qkv, int t) {
    int half = a->dim / 2, position = a->positions[t], slot = position % a->page;
    const int64_t *table = a->tables + (int64_t)a->row_of[t] * a->table_width;
    const float *cos = a->cos + (int64_t)position * half, *sin = a->sin + (int64_t)position * half;
    float *q = qkv + (int64_t)t * (a->heads + 2 * a->kv_heads) * a->dim, *k = q + a->heads * a->dim;
    for (int h = 0; h < a->heads; h++, q += a->dim) {
        if (a->q_norm) NAME(rms_norm_row)(0, q, a->q_norm, q, a->dim, a->eps);
        rotate(q, cos, sin, half, a->scale);
    }
    for (int h = 0; h < a->kv_heads; h++, k += a->dim) {
        if (a->k_norm) NAME(rms_norm_row)(0, k, a->k_norm, k, a->dim, a->eps);
        rotate(k, cos, sin, half, 1.0f);
        int size = a->bf16 ? sizeof(uint16_t) : sizeof(float);
        char *keys = page_of(a, size, table, position / a->page, h);
        put(keys + slot * size, a->bf16, a->page, k, a->dim);
        put(keys + (a->half + slot * a->dim) * size, a->bf16, 1, k + a->kv_heads * a->dim, a->dim);
    }
}

/* Scores of the N queries of each of S heads against TILE keys that lie across: scores[h][n][.] = sum over d of q[n][h][d] k[h][d][.]
 * `apart`: numbers from a head's queries to the next one's. */
TARGET INLINE void NAME(score_keys)(const int N, const int S, const int bf16, const float *const *q, int apart, const Piece *keys,
                                    int dim, float *scores, int64_t stride, const Piece *next) {
    vec s[MAX_QUERIES][NAME(PARTS)];
    EACH_HEAD EACH_QUERY EACH_PART s[h * N + n][i] = (vec){0};
    for (int d = 0; d < dim; d++)
        EACH_HEAD {
            vec k[NAME(PARTS)];
            __builtin_prefetch(next[h].at + d * next[h].stride);
            EACH_PART k[i] = NAME(take)(bf16, keys[h].at + d * keys[h].stride + i * LANES * SIZE);
            EACH_QUERY EACH_PART s[h * N + n][i] += k[i] * q[n][h * apart + d];
        }
    EACH_HEAD EACH_QUERY EACH_PART store(scores + (h * MAX_QUERIES + n) * stride + i * LANES, s[h * N + n][i]);
}

/* out[n][h][0 … dim) += sum over `count` keys, at most TILE, of p[h][n][key] v[h][key] */
TARGET INLINE void NAME(add_values)(const int N, const int S, const int bf16, const float *p, int64_t stride, const Piece *values,
                                    int dim, int count, float *const *out, int apart, const Piece *next) {
    for (int d = 0; d < dim; d += TILE) {
        vec o[MAX_QUERIES][NAME(PARTS)];
        EACH_HEAD EACH_QUERY EACH_PART o[h * N + n][i] = load(out[n] + h * apart + d + i * LANES);
        for (int j = 0; j < count; j++)
            EACH_HEAD {
                vec v[NAME(PARTS)];
                __builtin_prefetch(next[h].at + (d + j) * next[h].stride);
                EACH_PART v[i] = NAME(take)(bf16, values[h].at + (j * dim + d + i * LANES) * SIZE);
                EACH_QUERY EACH_PART o[h * N + n][i] += v[i] * p[(h * MAX_QUERIES + n) * stride + j];
            }
        EACH_HEAD EACH_QUERY EACH_PART store(out[n] + h * apart + d + i * LANES, o[h * N + n][i]);
    }
}

/* scores[first … last] → exp(score - max), zeros elsewhere in [0, padded); returns 1 / sum. */
TARGET INLINE float NAME(soften)(float *scores, int first, int last, int padded) {
    for (int j = 0; j < first; j++) scores[j] = LOWEST;
    for (int j = last + 1; j < padded; j++) scores[j] = LOWEST;
    vec top = (vec){0} + LOWEST, total = {0};
    for (int j = 0; j < padded; j += LANES) top = NAME(larger)(load(scores + j), top);
    float most = top[0];
    for (int i = 1; i < LANES; i++) most = top[i] > most ? top[i] : most;
    for (int j = 0; j < padded; j += LANES) store(scores + j, NAME(exp)(load(scores + j) - most));
    for (int j = 0; j < first; j++) scores[j] = 0;
    for (int j = last + 1; j < padded; j++) scores[j] = 0;
    for (int j = 0; j < padded; j += LANES) total += load(scores + j);
    return 1.0f / NAME(sum)(total);
}

/* One reading of all keys, or of all values, S heads at a time: as many streams, which memory serves faster than one. */
TARGET INLINE void NAME(read)(const int N, const int S, const int bf16, const int of_values, const Reading *r, const Queries *s,
                              float *scores) {
    const Attention *a = r->a;
    int apart = r->apart;
    int64_t stride = a->scores_stride;
    for (int i = 0, taken; i < r->pieces; i += taken) {
        int h = i % r->heads, j = i / r->heads * TILE, count = r->positions - j < TILE ? r->positions - j : TILE;
        const float *q[MAX_QUERIES];
        float *out[MAX_QUERIES], *own = scores + h * MAX_QUERIES * stride + j;
        Piece here[STREAMS], next[STREAMS];
        EACH_QUERY q[n] = s->q[n] + h * apart, out[n] = s->out[n] + h * apart;
        taken = r->heads - h < S ? 1 : S;
        for (int u = 0, at = i + of_values * r->pieces + u; u < taken; u++, at++)
            here[u] = piece(r, SIZE, at), next[u] = piece(r, SIZE, at + AHEAD);
        if (of_values && taken == S) NAME(add_values)(N, S, bf16, own, stride, here, a->dim, count, out, apart, next);
        else if (of_values) NAME(add_values)(N, 1, bf16, own, stride, here, a->dim, count, out, apart, next);
        else if (taken == S) NAME(score_keys)(N, S, bf16, q, apart, here, a->dim, own, stride, next);
        else NAME(score_keys)(N, 1, bf16, q, apart, here, a->dim, own, stride, next);
    }
}

/* Positions from `base` on: the last multiple of TILE before all that is seen, so that a position has its lane in every company. */
TARGET INLINE void NAME(attend_n)(const int N, const int bf16, const Attention *a, const int64_t *table, int head, int heads,
                                  const Queries *s, float *scores) {
    const int S = N * STREAMS <= MAX_QUERIES ? STREAMS : 1; /* or their sums do not fit the registers */
    int base = s->first[0] / TILE * TILE, positions = s->last[N - 1] + 1 - base, tiles = (positions + TILE - 1) / TILE;
    int apart = a->heads / a->kv_heads * a->dim;
    Reading r = {a, table, head, heads, base, positions, tiles * heads, apart};
    NAME(read)(N, S, bf16, 0, &r, s, scores);
    float inverse[MOST_HEADS][MAX_QUERIES];
    for (int h = 0; h < heads; h++)
        EACH_QUERY {
            float *own = scores + (h * MAX_QUERIES + n) * a->scores_stride;
            inverse[h][n] = NAME(soften)(own, s->first[n] - base, s->last[n] - base, tiles * TILE);
            memset(s->out[n] + h * apart, 0, a->dim * sizeof(float));
        }
    NAME(read)(N, S, bf16, 1, &r, s, scores);
    for (int h = 0; h < heads; h++)
        EACH_QUERY for (float *out = s->out[n] + h * apart, *end = out + a->dim; out < end; out += LANES)
            store(out, load(out) * inverse[h][n]);
}

#define CASE(N) \
    case 2 * N: NAME(attend_n)(N, 0, a, table, head, heads, queries, scores); break; \
    case 2 * N + 1: NAME(attend_n)(N, 1, a, table, head, heads, queries, scores); break;
TARGET static void NAME(attend)(int N, const Attention *a, const int64_t *table, int head, int heads, const Queries *queries,
                                float *scores) {
    switch (2 * N + !!a->bf16) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}
#undef CASE

static const Kernels NAME(kernels) = {NAME(rms_norm_row), NAME(gated_row), NAME(capped_row), NAME(append_token), NAME(attend)};

#undef vec
#undef ints
#undef load
#undef store
#undef SIZE
#undef EACH_PART
#undef EACH_QUERY
#undef EACH_HEAD
#undef NAME
#undef TARGET
#undef LANES
