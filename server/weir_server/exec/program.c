/* A forward of the model as a list of operations, which exec/program.py has traced from model/decoder.py's equations.
 *
 * One parallel region runs the whole list: threads are woken once for a forward and not once for each of its 270 operations, and
 * nothing between two operations is Python's. After each operation they meet at a barrier that spins for a moment before it sleeps:
 * what they wait for is mostly a few microseconds away, but where another process has taken a thread's core, the others' cores
 * must come free for it.
 *
 * OpenMP is compiled in but not linked, see kernels.c. */

#include "gemm.h"
#include "kernels.h"

#include <string.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

extern int omp_get_num_threads(void);
extern int omp_get_thread_num(void);

enum {
    SPINS = 1000,    /* looks at the barrier before a thread sleeps: about 20 µs */
    SMALL = 1 << 18, /* multiply-adds that are not worth a second thread */
};

enum { PICK, NORM, PRODUCT, ATTENTION, GATED, CAPPED };

/* `in`, `with` and `out` are numbers of buffers, -1 for none. */
typedef struct {
    int32_t code;
    int32_t picked;        /* 0: over all tokens; 1: over those that the head reads */
    int32_t in, with, out;
    int32_t choice;        /* attention: the type; product: whether of 8 bits; gated: whether gelu */
    int32_t isa;           /* product */
    float number;          /* norm: eps; capped: the cap */
    int64_t n, k;          /* features of `out`; product: of `in` */
    const void *weight;
    const float *bias, *q_norm, *k_norm;
    int64_t offset;        /* attention: numbers from a block to this layer's page */
} Op;

typedef struct {
    const Op *ops;
    int64_t n_ops;
    int64_t rows[2];       /* all tokens; those picked */
    void *const *buffers;  /* [rows][features] each */
    const int64_t *picked; /* [rows[1]]: which tokens */
    const Attention *attention; /* by type */
    const int32_t *tiles;  /* [n_tiles][2]: first token and number of tokens, of one row each */
    int64_t n_tiles;
    int64_t work;          /* multiply-adds, about: decides about threads */
} Run;

/* ------------------------------------------------------------------------------------------------ threads */

typedef struct {
    int threads;
    int32_t arrived, turn, asleep;
    char apart[CACHE_LINE];
    Share shares[2][MOST_THREADS]; /* of operations with an even and with an odd number */
} Team;

static void pause_a_moment(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void sleep_while(int32_t *turn, int32_t seen) {
#if defined(__linux__)
    syscall(SYS_futex, turn, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
#else
    (void)turn, (void)seen;
    sched_yield();
#endif
}

static void wake_all(int32_t *turn) {
#if defined(__linux__)
    syscall(SYS_futex, turn, FUTEX_WAKE_PRIVATE, MOST_THREADS, 0, 0, 0);
#else
    (void)turn;
#endif
}

/* Returns when all threads have come. Whoever goes to sleep says so first and looks at `turn` again (the system call does), so the
 * last to come either sees the sleeper or is seen by it. */
static void meet(Team *team) {
    int32_t seen = __atomic_load_n(&team->turn, __ATOMIC_SEQ_CST);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_SEQ_CST) == team->threads) {
        __atomic_store_n(&team->arrived, 0, __ATOMIC_SEQ_CST);
        __atomic_store_n(&team->turn, seen + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&team->asleep, __ATOMIC_SEQ_CST)) wake_all(&team->turn);
        return;
    }
    for (int i = 0; i < SPINS; i++) {
        if (__atomic_load_n(&team->turn, __ATOMIC_ACQUIRE) != seen) return;
        pause_a_moment();
    }
    __atomic_add_fetch(&team->asleep, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&team->turn, __ATOMIC_SEQ_CST) == seen) sleep_while(&team->turn, seen);
    __atomic_sub_fetch(&team->asleep, 1, __ATOMIC_SEQ_CST);
}

/* ------------------------------------------------------------------------------------------------ operations */

/* Rows begin … end-1 of `rows` are this thread's. */
#define EACH_OWN(i, rows) \
    for (int64_t i = (rows) * self / team->threads, end_##i = (rows) * (self + 1) / team->threads; i < end_##i; i++)

typedef struct {
    const Run *run;
    const Op *op;
    float *in, *with, *out;
    int64_t rows;
    Share *shares;
} Job;

static void pick(const Job *j, const Team *team, int self) {
    EACH_OWN(r, j->rows) memcpy(j->out + r * j->op->n, j->in + j->run->picked[r] * j->op->n, j->op->n * sizeof(float));
}

static void norm(const Job *j, const Team *team, int self) {
    int64_t n = j->op->n;
    EACH_OWN(r, j->rows)
        weir_kernels->rms_norm_row(j->in ? j->in + r * n : 0, j->with + r * n, j->op->weight, j->out + r * n, (int)n,
                                   j->op->number);
}

static void product(const Job *j, const Team *team, int self) {
    const Op *op = j->op;
    Product p = {op->isa, op->choice, j->rows, op->n, op->k, j->in, op->k, op->weight, op->bias, j->out, op->n};
    weir_product_share(&p, j->shares, team->threads, self);
}

static void attention(const Job *j, Team *team, int self) {
    const Run *run = j->run;
    Attention a = run->attention[j->op->choice];
    a.pool += j->op->offset * (a.bf16 ? sizeof(uint16_t) : sizeof(float)), a.q_norm = j->op->q_norm, a.k_norm = j->op->k_norm;
    EACH_OWN(t, j->rows) weir_kernels->append_token(&a, j->in, (int)t);
    meet(team);
    float *scores = a.scratch + (int64_t)self * a.together * MAX_QUERIES * a.scores_stride;
    int64_t units = run->n_tiles * ((a.kv_heads + a.together - 1) / a.together), u;
    while ((u = __atomic_fetch_add(&j->shares[0].taken, 1, __ATOMIC_RELAXED)) < units) {
        const int32_t *tile = run->tiles + 2 * (u % run->n_tiles);
        int head = (int)(u / run->n_tiles) * a.together, left = a.kv_heads - head;
        weir_attend_tile(&a, j->in, j->out, tile[0], tile[1], head, left < a.together ? left : a.together, scores);
    }
}

/* Elementwise: a thread takes its columns of every row. */
static void gated(const Job *j, const Team *team, int self) {
    int64_t n = j->op->n, begin = n / TILE * self / team->threads * TILE, end = n / TILE * (self + 1) / team->threads * TILE;
    for (int64_t r = 0; r < j->rows; r++) {
        const float *gate = j->in + r * 2 * n + begin;
        weir_kernels->gated_row(gate, gate + n, j->out + r * n + begin, (int)(end - begin), j->op->choice);
    }
}

static void capped(const Job *j, const Team *team, int self) {
    EACH_OWN(r, j->rows) weir_kernels->capped_row(j->out + r * j->op->n, (int)j->op->n, j->op->number);
}

static float *buffer(const Run *run, int32_t number) { return number < 0 ? 0 : run->buffers[number]; }

static void operate(const Run *run, Team *team, int self) {
    for (int64_t i = 0; i < run->n_ops; i++) {
        const Op *op = &run->ops[i];
        Job job = {run, op, buffer(run, op->in), buffer(run, op->with), buffer(run, op->out), run->rows[op->picked],
                   team->shares[i % 2]};
        if (!self) memset(team->shares[(i + 1) % 2], 0, team->threads * sizeof(Share)); /* all have left the operation before */
        switch (op->code) {
        case PICK: pick(&job, team, self); break;
        case NORM: norm(&job, team, self); break;
        case PRODUCT: product(&job, team, self); break;
        case ATTENTION: attention(&job, team, self); break;
        case GATED: gated(&job, team, self); break;
        case CAPPED: capped(&job, team, self); break;
        }
        meet(team);
    }
}

/* ------------------------------------------------------------------------------------------------ what is called */

int weir_run_bytes(void) { return sizeof(Run) + sizeof(Op) + sizeof(Attention); } /* who has other structs is of another build */

void weir_run(const Run *run) {
    Team team = {.threads = 0};
#pragma omp parallel if (run->work > SMALL)
    {
        int threads = omp_get_num_threads(), self = omp_get_thread_num();
        if (threads > MOST_THREADS) threads = MOST_THREADS;
#pragma omp single
        team.threads = threads;
        if (self < threads) operate(run, &team, self);
    }
}
