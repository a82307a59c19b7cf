/* Runs random passes on the thread pool, with random numbers of threads, and checks every result. Prints the number of
   wrong passes. Arguments: the numbers of passes, of callers and of forks. Some threads fail to start. */

#include <pthread.h>

static unsigned creations;

static int create(pthread_t *thread, void *(*run)(void *), void *argument) {
    return ++creations % 8 == 0 ? 1 : pthread_create(thread, 0, run, argument);
}
#define pthread_create(thread, attributes, run, argument) create(thread, run, argument)
#include "../../../../specpool/engine/native/pool.h"
#undef pthread_create

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>

enum { MAX_UNITS = 40, MAX_STAGES = 12, MAX_THREADS = 64, MAX_CALLERS = 4 };

typedef uint64_t Values[MAX_STAGES + 1][MAX_UNITS];

typedef struct {
    Values values;           /* of all units, by stage */
    int claims[MAX_THREADS]; /* by thread; two threads with one number would race here */
} Run;

static uint64_t uniform(uint64_t *seed) { return (*seed = *seed * 6364136223846793005u + 1442695040888963407u) >> 33; }

/* The value of a unit: depends on all units of the stage before. */
static uint64_t value_of(const uint64_t *before, int64_t stage, int64_t unit) {
    uint64_t sum = stage * 31 + unit;
    for (int64_t i = 0; i < MAX_UNITS; i++) sum = sum * 1000003 + before[i];
    return sum;
}

/* Adds, so a unit that runs twice is wrong. */
static void work(const Stage *stage, int64_t unit, int64_t end) {
    Run *run = (Run *)stage->pass;
    run->claims[thread_number]++;
    for (; unit < end; unit++) run->values[stage->rows + 1][unit] += value_of(run->values[stage->rows], stage->rows, unit);
}

/* Runs a random pass. Returns whether its result is wrong. */
static int is_wrong(uint64_t *seed, int64_t threads) {
    Run *run = calloc(1, sizeof(Run)); /* a new one, so late claims of earlier passes would be noticed */
    Stage stages[MAX_STAGES];
    int64_t count = uniform(seed) % (MAX_STAGES + 1);
    Values expected = {{0}};
    for (int64_t s = 0; s < count; s++) {
        int64_t units = uniform(seed) % (uniform(seed) % 4 ? MAX_UNITS : 3), grain = 1 + uniform(seed) % 4;
        stages[s] = (Stage){work, units, grain, 1 + uniform(seed) % (threads + 1), 0, .pass = run, .rows = s};
        for (int64_t unit = 0; unit < units; unit++) expected[s + 1][unit] = value_of(expected[s], s, unit);
    }
    run_stages(stages, stages + count, threads);
    int wrong = memcmp(expected, run->values, sizeof(expected)) != 0;
    free(run);
    return wrong;
}

static int passes, wrong;

static void *call(void *argument) {
    uint64_t seed = (intptr_t)argument + 1;
    int64_t threads = 4;
    for (int pass = 0; pass < passes; pass++) {
        if (uniform(&seed) % 32 == 0) threads = 1 + uniform(&seed) % (uniform(&seed) % 16 ? 9 : MAX_THREADS);
        if (uniform(&seed) % 64 == 0) usleep(uniform(&seed) % 300); /* the others fall asleep */
        if (is_wrong(&seed, threads)) __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
    }
    return 0;
}

static void ignore(int number) { (void)number; }

int main(int count, char **arguments) {
    if (count != 4) return 2;
    int callers = atoi(arguments[2]), forks = atoi(arguments[3]);
    passes = atoi(arguments[1]);
    if (forks) { /* not otherwise: a signal would end a wait whose wake-up was lost */
        sigaction(SIGALRM, &(struct sigaction){.sa_handler = ignore}, 0);
        setitimer(ITIMER_REAL, &(struct itimerval){{0, 300}, {0, 300}}, 0);
    }
    pthread_t threads[MAX_CALLERS];
    for (intptr_t i = 0; i < callers; i++) pthread_create(threads + i, 0, call, (void *)i);
    for (int i = 0; i < forks; i++) { /* in the middle of passes */
        pid_t child = fork();
        if (!child) {
            passes = 50;
            call((void *)(intptr_t)MAX_CALLERS);
            _exit(wrong != 0);
        }
        int status;
        while (waitpid(child, &status, 0) < 0) {}
        if (status) __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
    }
    for (int i = 0; i < callers; i++) pthread_join(threads[i], 0);
    printf("%d\n", wrong);
    return 0;
}
