/* What program.c needs of kernels.c: the small operations of a decoder, a piece at a time, by the chosen instruction set. */
#ifndef WEIR_KERNELS_H
#define WEIR_KERNELS_H

#include <stdint.h>

enum { TILE = 16 }; /* keys scored, or features summed, at a time: divides page size, head_dim and all widths */

/* Attention of one type in one step; what differs from layer to layer is the operation's. */
typedef struct {
    char *pool;               /* this layer's page in block 0; what is stored there are numbers of float or, if `bf16`, of 2 bytes */
    int64_t half;             /* numbers from K to V */
    int bf16, heads, kv_heads, dim, page;
    int window;               /* positions that a query sees, its own included; 0 = all before it */
    int table_width;
    float scale, eps;         /* of the scores; of the norms of q and k */
    const int32_t *positions; /* [tokens] */
    const int32_t *row_of;    /* [tokens] */
    const int64_t *tables;    /* [rows][table_width]: numbers from block 0 to the block of positions i page … */
    const float *cos, *sin;   /* [context][dim / 2] */
    const float *q_norm, *k_norm; /* [dim], or NULL: heads are not normalised */
    int together;             /* KV heads, at most MOST_HEADS, whose keys and values a tile's queries read in one go */
    int64_t scores_stride;    /* floats of a query's scores */
    float *scratch;           /* [threads][together][MAX_QUERIES][scores_stride] */
} Attention;

enum { MAX_QUERIES = 6, MOST_HEADS = 8 }; /* queries that share a pass over keys: with AVX2 their sums fill 12 of 16 registers */

/* N queries of one row that share a KV head, in order of position; query n sees positions first[n] … last[n]. Those of the next
 * KV head lie (heads / kv_heads) * dim further. */
typedef struct {
    const float *q[MAX_QUERIES];
    float *out[MAX_QUERIES];
    int first[MAX_QUERIES], last[MAX_QUERIES];
} Queries;

typedef struct {
    /* residual += x (where x is not NULL), out = residual / rms(residual) · weight; n features */
    void (*rms_norm_row)(const float *x, float *residual, const float *weight, float *out, int n, float eps);
    /* out = activation(gate) · up; n elements */
    void (*gated_row)(const float *gate, const float *up, float *out, int n, int gelu);
    /* x = cap · tanh(x / cap); n elements */
    void (*capped_row)(float *x, int n, float cap);
    /* Normalise and rotate a token's queries (scaled) and keys in place; keys and values go into their page. */
    void (*append_token)(const Attention *a, float *qkv, int t);
    void (*attend)(int N, const Attention *a, const int64_t *table, int head, int heads, const Queries *queries, float *scores);
} Kernels;

extern const Kernels *weir_kernels;

/* One tile: `count` consecutive tokens of one row from token t on, all query heads of KV heads head … head + heads - 1. */
void weir_attend_tile(const Attention *a, const float *qkv, float *out, int t, int count, int head, int heads, float *scores);

#endif
