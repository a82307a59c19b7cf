/* How many rows of a panel are computed together. */

/* Compute TILE rows of a panel together, as many as fit into registers. For a single row, compute ABREAST panels
   together to hide latency. */
#if defined(__AVX512F__)
#define TILE 8
#define SUMS 16
#define ABREAST 3
#else
#define TILE 3
#define SUMS 12
#define ABREAST 1
#endif

/* OF_ROWS(rows), or OF_ROWS(TILE) for more rows. */
#if TILE > 3
#define BY_ROWS(rows) \
    switch (rows) { \
    case 1: OF_ROWS(1) \
    case 2: OF_ROWS(2) \
    case 3: OF_ROWS(3) \
    case 4: OF_ROWS(4) \
    case 5: OF_ROWS(5) \
    case 6: OF_ROWS(6) \
    case 7: OF_ROWS(7) \
    default: OF_ROWS(TILE) \
    }
#else
#define BY_ROWS(rows) \
    switch (rows) { \
    case 1: OF_ROWS(1) \
    case 2: OF_ROWS(2) \
    default: OF_ROWS(TILE) \
    }
#endif
