/* The inner loops of gemm.c, included once for each instruction set with these defined: NAME(x), TARGET (attribute), LANES
 * (floats of a vector), ROWS (rows of x whose sums fit the registers), ROWS_Q8 (the same beside what 8-bit weights need), FEW and
 * FEW_Q8 (rows that take TOGETHER panels at once). */

enum { NAME(PARTS) = WIDTH / LANES };
typedef float NAME(vec) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t NAME(ints) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

TARGET INLINE NAME(vec) NAME(load)(const float *p) { return *(const NAME(vec) *)p; }
TARGET INLINE void NAME(store)(float *p, NAME(vec) v) { *(NAME(vec) *)p = v; }

/* Byte i of every lane times the scale of its column. A weight is this product rounded, on every path. */
TARGET INLINE NAME(vec) NAME(widen)(NAME(ints) four, int i, NAME(vec) scale) {
    return __builtin_convertvector((four << (24 - 8 * i)) >> 24, NAME(vec)) * scale;
}

#define EACH_SUM UNROLL for (int r = 0; r < R; r++) UNROLL for (int p = 0; p < P * NAME(PARTS); p++)
#define OF_PART(p, panel, part) ((p) / NAME(PARTS) * (panel) + (p) % NAME(PARTS) * (part))
#define START EACH_SUM sum[r][p] = add ? NAME(load)(y + r * ldy + p * LANES) : (NAME(vec)){0};
#define FINISH EACH_SUM NAME(store)(y + r * ldy + p * LANES, sum[r][p]);

/* y[r][0 … 16 P) (+)= sum over k, ascending, of x[r][k] w[k][0 … 16 P), in P panels of `panel` floats that lie end to end. Fetches
 * `lines` cache lines of `next` every 8 k. */
TARGET INLINE void NAME(rows)(const int R, const int P, int64_t K, const float *x, int64_t ldx, const float *w, int64_t panel,
                              float *y, int64_t ldy, int add, const char *next, int lines) {
    NAME(vec) sum[ROWS][TOGETHER * NAME(PARTS)];
    START
#define MULTIPLY(k) EACH_SUM sum[r][p] += NAME(load)(w + (k) * WIDTH + OF_PART(p, panel, LANES)) * x[r * ldx + (k)];
    int64_t k = 0;
    for (; k + 8 <= K; k += 8) {
        for (int i = 0; i < lines; i++, next += LINE) __builtin_prefetch(next, 0, 2);
        UNROLL for (int j = 0; j < 8; j++) { MULTIPLY(k + j) }
    }
    for (; k < K; k++) { MULTIPLY(k) }
#undef MULTIPLY
    FINISH
}

/* The same for 8-bit weights, widened in registers, and P panels of `bytes` that lie end to end, whose columns do too: what `rows`
 * gives for what `widen_panel` gives, bit for bit. */
TARGET INLINE void NAME(rows_q8)(const int R, const int P, int64_t K, const float *x, int64_t ldx, const int8_t *w,
                                 int64_t bytes, float *y, int64_t ldy) {
    NAME(vec) sum[ROWS_Q8][TOGETHER * NAME(PARTS)], scale[TOGETHER * NAME(PARTS)];
    NAME(ints) four[TOGETHER * NAME(PARTS)];
#define EACH_PART UNROLL for (int p = 0; p < P * NAME(PARTS); p++)
#define MULTIPLY(i) EACH_SUM sum[r][p] += NAME(widen)(four[p], i, scale[p]) * x[r * ldx + k + (i)];
    EACH_SUM sum[r][p] = (NAME(vec)){0};
    const int8_t *end = w + bytes;
    for (int64_t k = 0; k < K; w += GROUP_BYTES) {
        const int8_t *next = w + AHEAD_Q8 + (w + AHEAD_Q8 < end ? 0 : (P - 1) * bytes);
        EACH_PART scale[p] = NAME(load)((const float *)(w + OF_PART(p, bytes, 4 * LANES)));
        for (const int8_t *line = w + LINE; line < w + GROUP_BYTES && k < K; line += LINE) {
            UNROLL for (int p = 0; p < P; p++) __builtin_prefetch(next + (line - w) + p * bytes, 0, 3);
            EACH_PART four[p] = *(const NAME(ints) *)(line + OF_PART(p, bytes, 4 * LANES));
            if (k + 4 <= K) {
                MULTIPLY(0) MULTIPLY(1) MULTIPLY(2) MULTIPLY(3)
            } else {
                for (int i = 0; k + i < K; i++) { MULTIPLY(i) }
            }
            k += 4;
        }
    }
    FINISH
#undef MULTIPLY
#undef EACH_PART
}

/* `groups` groups of a packed panel as float32 [32 groups][16]. */
TARGET static void NAME(widen_panel)(int64_t groups, const int8_t *w, float *out) {
    for (; groups; groups--) {
        const float *scales = (const float *)w;
        w += LINE;
        for (int k = 0; k < GROUP; k += 4, w += LINE, out += 4 * WIDTH) {
            __builtin_prefetch(w + AHEAD_Q8, 0, 2);
            UNROLL for (int p = 0; p < NAME(PARTS); p++) {
                NAME(ints) four = *(const NAME(ints) *)(w + 4 * p * LANES);
                UNROLL for (int i = 0; i < 4; i++)
                    NAME(store)(out + i * WIDTH + p * LANES, NAME(widen)(four, i, NAME(load)(scales + p * LANES)));
            }
        }
    }
}

#define CASE(R) case R: NAME(rows)(R, 1, K, x, ldx, w, 0, y, ldy, add, next, lines); break;
TARGET static void NAME(tile)(int rows, int64_t K, const float *x, int64_t ldx, const float *w, float *y, int64_t ldy, int add,
                              const char *next, int lines) {
    switch (rows) {
    CASE(1) CASE(2)
#if ROWS > 2
    CASE(3) CASE(4) CASE(5) CASE(6)
#endif
#if ROWS > 6
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}
#undef CASE

#define CASE(R, P) case R: NAME(rows_q8)(R, P, K, x, ldx, w, bytes, y, ldy); break;
TARGET static void NAME(tile_q8)(int rows, int64_t K, const float *x, int64_t ldx, const int8_t *w, int64_t bytes, float *y,
                                 int64_t ldy) {
    switch (rows) {
    CASE(1, 1)
#if ROWS_Q8 > 1
    CASE(2, 1) CASE(3, 1) CASE(4, 1)
#endif
    }
}

TARGET static void NAME(together_q8)(int rows, int64_t K, const float *x, int64_t ldx, const void *w, int64_t bytes, float *y,
                                     int64_t ldy) {
    switch (rows) {
    CASE(1, TOGETHER)
#if FEW_Q8 > 1
    CASE(2, TOGETHER)
#endif
    }
}
#undef CASE

#define CASE(R) case R: NAME(rows)(R, TOGETHER, K, x, ldx, w, bytes / (int64_t)sizeof(float), y, ldy, 0, 0, 0); break;
TARGET static void NAME(together_f32)(int rows, int64_t K, const float *x, int64_t ldx, const void *w, int64_t bytes, float *y,
                                      int64_t ldy) {
    switch (rows) {
    CASE(1)
#if FEW > 1
    CASE(2) CASE(3)
#endif
    }
}
#undef CASE

static const Isa NAME(isa) = {
    ROWS, ROWS_Q8, {FEW, FEW_Q8}, TOGETHER, NAME(tile), NAME(tile_q8), {NAME(together_f32), NAME(together_q8)}, NAME(widen_panel),
};

#undef EACH_SUM
#undef OF_PART
#undef START
#undef FINISH
#undef NAME
#undef TARGET
#undef LANES
#undef ROWS
#undef ROWS_Q8
#undef FEW
#undef FEW_Q8
#undef TOGETHER
