#include <stdint.h>

/* How a pass runs the recurrence of a span; see `Segment` of checkpoints.py. */
typedef struct {
    int64_t first_row, rows, start, read, read_position, read_tail, write, write_position, write_tail;
} Segment;
