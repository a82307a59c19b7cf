/* Threads that share the work of a pass: a list of stages, each a number of units, such as the panels of a GEMM. A thread
   claims units whenever it is free, and the thread that finishes a stage starts the next one. So a thread that loses its
   core delays the others only while it holds units. With barriers it would delay every stage.

   A unit has the same bits on every thread, so neither the number of threads nor their luck changes a result. */

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Polls before a thread sleeps: some tens of microseconds. */
#ifndef POLLS
#define POLLS 1000
#endif

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() __asm__ volatile("")
#endif

#define APART __attribute__((aligned(128))) /* own cache lines */

/* A stage of a pass. `grain`: minimum units of a claim. A claim takes 1 / `shares` of the units left if that is more. */
typedef struct Stage {
    void (*work)(const struct Stage *stage, int64_t first, int64_t end);
    int64_t units, grain, shares;
    int kind;
    const void *pass, *item; /* arguments of `work`, like the rest */
    const float *x;
    float *out;
    int64_t rows;
} Stage;

/* The state is number << 32 | IDLE | units left to claim. Each stage has its own number, so a claim succeeds only while
   its stage runs. The size of the claim may come from outdated fields, which harms nothing. */
#define IDLE (1ull << 31)
#define UNITS(state) ((int64_t)((state) & (IDLE - 1)))

static struct {
    APART uint64_t state;
    APART int64_t finished; /* units of the stage */
    APART const Stage *stage, *end;
    int64_t grain, shares, threads;
    APART uint32_t signal; /* the futex */
    int sleepers;
    APART pthread_mutex_t taken;
    int64_t started;    /* threads beyond the first */
    int64_t generation; /* a new one for another number of threads; threads of older ones end */
} pool = {.state = IDLE, .taken = PTHREAD_MUTEX_INITIALIZER};

/* Number of this thread in the pool. */
static __thread int64_t thread_number;

/* Seconds of each kind of stage since the library was loaded. */
#ifdef MEASURED
double stage_seconds[8];
static double stage_began;
static void begin_stage(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    stage_began = now.tv_sec + 1e-9 * now.tv_nsec;
}
static void end_stage(const Stage *stage) {
    double began = stage_began;
    begin_stage();
    stage_seconds[stage->kind] += stage_began - began;
}
#else
static void begin_stage(void) {}
static void end_stage(const Stage *stage) { (void)stage; }
#endif

#define LOAD(field) __atomic_load_n(&pool.field, __ATOMIC_RELAXED)
#define STORE(field, value) __atomic_store_n(&pool.field, value, __ATOMIC_RELAXED)

/* The first thread and the others sleep with different bits, so the first can be woken alone. */
#define FIRST 1u
#define OTHERS 2u

/* Threads to wake at a time. Each wakes as many again: waking one takes a microsecond. */
#define WOKEN 2

static void wake(int64_t count, uint32_t which) {
    if (!__atomic_load_n(&pool.sleepers, __ATOMIC_SEQ_CST)) return;
    __atomic_add_fetch(&pool.signal, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &pool.signal, FUTEX_WAKE_BITSET_PRIVATE, (int)count, 0, 0, which);
}

/* Starts the first stage from `stage` on that has units. Called while no thread holds any. */
static void start_stage(const Stage *stage) {
    while (stage < pool.end && stage->units == 0) stage++;
    uint64_t number = (LOAD(state) >> 32) + 1;
    int is_last = stage == pool.end;
    STORE(finished, 0);
    STORE(stage, stage);
    if (!is_last) {
        STORE(grain, stage->grain);
        STORE(shares, stage->shares);
    }
    int64_t claims = is_last ? 0 : (stage->units + stage->grain - 1) / stage->grain;
    __atomic_store_n(&pool.state, number << 32 | (is_last ? IDLE : (uint64_t)stage->units), __ATOMIC_SEQ_CST);
    /* From here on, other threads may end the pass, and its stages may be gone. */
    if (is_last && thread_number > 0) wake(1, FIRST);
    if (claims > 1) wake(claims - 1 < WOKEN ? claims - 1 : WOKEN, FIRST | OTHERS);
}

/* Claims and runs some units of the stage in `state`. */
static void run_units(uint64_t state) {
    int64_t left = UNITS(state), grain = LOAD(grain), take = left / LOAD(shares);
    take = take > grain ? take : grain < left ? grain : left;
    if (!__atomic_compare_exchange_n(&pool.state, &state, state - take, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) return;
    const Stage *stage = pool.stage;
    int64_t units = stage->units;
    stage->work(stage, units - left, units - left + take);
    if (__atomic_add_fetch(&pool.finished, take, __ATOMIC_ACQ_REL) < units) return;
    end_stage(stage);
    start_stage(stage + 1);
}

/* Polls and then sleeps until there may be units to claim, or until a pass of the first thread has ended. */
static uint64_t wait_for_units(void) {
    uint64_t until = thread_number == 0 ? IDLE : 0, state;
    for (int polls = 0; polls < POLLS; polls++) {
        state = __atomic_load_n(&pool.state, __ATOMIC_ACQUIRE);
        if (UNITS(state) || state & until) return state;
        RELAX();
    }
    uint32_t signal = __atomic_load_n(&pool.signal, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
    state = __atomic_load_n(&pool.state, __ATOMIC_SEQ_CST);
    if (!UNITS(state) && !(state & until))
        syscall(SYS_futex, &pool.signal, FUTEX_WAIT_BITSET_PRIVATE, signal, 0, 0, until ? FIRST : OTHERS);
    __atomic_sub_fetch(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
    state = __atomic_load_n(&pool.state, __ATOMIC_ACQUIRE);
    if (UNITS(state)) wake(WOKEN, FIRST | OTHERS);
    return state;
}

/* The numbers of a thread and of its generation, as the argument of `help`. */
#define HELPER(number, generation) (void *)(intptr_t)((generation) << 16 | (number))

static void *help(void *argument) {
    int64_t generation = (intptr_t)argument >> 16;
    thread_number = (intptr_t)argument & 0xffff;
    for (;;) {
        uint64_t state = wait_for_units();
        if (LOAD(generation) != generation) return 0;
        if (UNITS(state)) run_units(state);
    }
}

/* Starts threads until there are `threads`; fewer if the system refuses. */
static void start_threads(int64_t threads) {
    if (pool.threads != threads) {
        STORE(generation, pool.generation + 1);
        wake(INT_MAX, OTHERS);
        pool.started = 0;
        pool.threads = threads;
    }
    while (pool.started < threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, 0, help, HELPER(pool.started + 1, pool.generation))) return;
        pthread_detach(thread);
        pool.started++;
    }
}

/* Runs all stages, on this thread alone if the pool is taken. */
static void run_stages(const Stage *stages, const Stage *end, int64_t threads) {
    begin_stage();
    if (threads == 1 || pthread_mutex_trylock(&pool.taken)) {
        for (; stages < end; stages++) {
            if (stages->units) stages->work(stages, 0, stages->units);
            end_stage(stages);
        }
        return;
    }
    start_threads(threads);
    pool.end = end;
    start_stage(stages);
    for (uint64_t state; !((state = wait_for_units()) & IDLE);)
        if (UNITS(state)) run_units(state);
    pthread_mutex_unlock(&pool.taken);
}

static int64_t current_thread(void) { return thread_number; }

/* A library's pool, which other libraries may run stages on. */
typedef struct Pool {
    void (*run)(const Stage *stages, const Stage *end, int64_t threads);
    int64_t (*thread)(void); /* number of the calling thread */
} Pool;

const Pool own_pool = {run_stages, current_thread};
