/* The inner loop of the search: the ledger of a schedule, random changes of it, and the archive of what they
   met.

   It is `plan/ledger.py` and `plan/annealing.py` again, which stay the reference: same decisions, same random
   numbers, same results to the bit. The names are theirs, and their docstrings say what each part means.

   Arrays of a `Problem` belong to the caller and outlive the Core. Everything else belongs to the Core. If an
   allocation fails, the call returns NO_MEMORY, and the Core can only be closed. A problem that the loops
   could not walk safely is refused with BAD_PROBLEM. */
#ifndef STOWPLAN_CORE_H
#define STOWPLAN_CORE_H

#include <float.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>

#if FLT_EVAL_METHOD != 0
#error "sums of doubles would have more bits here than Python's"
#endif

#ifdef _WIN32
#define API __declspec(dllexport)
#else
#define API __attribute__((visibility("default")))
#endif

enum { KEEP, HOLD, EACH, AHEAD, STATES };
enum { DONE, NO_MEMORY, BAD_PROBLEM, BAD_CALL };
#define NEVER (-1)

/* Row i of a table is items[starts[i]] up to items[starts[i + 1]]. */
typedef struct {
    const int32_t *starts, *items;
    int64_t count; /* of the items */
} Table;

typedef struct {
    int32_t ops, values, gaps, groups, turn;
    int64_t standing_bytes;
    const int64_t *nbytes;          /* of a value */
    const int64_t *temporary_bytes; /* of an op */
    const int64_t *ticks;           /* of an op */
    const int32_t *producer;        /* of a value */
    const uint8_t *held, *droppable;
    Table reads, writes;     /* of an op: values */
    Table targets;           /* of an op: its outputs that may overwrite an input which ends there */
    Table victims;           /* of a target, by its place in `targets`: these inputs */
    const int32_t *group_of; /* of a gap: its group of twins */
    Table twins;             /* of a group: gaps */
} Problem;

typedef struct {
    int32_t *at;
    size_t count, room;
} List;

/* The ops recomputed before an op, and the values made there or also read there; all ascending. */
typedef struct {
    List ops, demanded, involved;
    int64_t ticks;
} Chain;

typedef struct {
    int64_t peak, ticks;
    uint8_t *states;
} Point;

/* A set of numbers that is emptied by raising `now`: a number is in it if its stamp is `now`. */
typedef struct {
    uint64_t *stamps, now;
} Marks;

typedef struct {
    Problem problem;
    jmp_buf failure; /* where a failed allocation goes */
    int is_broken;

    int32_t *use_starts, *uses; /* by value: its maker, then its readers */
    int32_t *first, *value_of;  /* as in Gaps */

    uint8_t *states;
    int64_t extra_ticks;
    int32_t *remade;
    List *ahead, *via;
    Chain *chains;
    int32_t *span_counts, *spans;   /* of value v: pairs from spans[2 * use_starts[v]] on */
    int32_t *gap_starts, *gap_ends; /* what a gap adds to the spans */
    int64_t *through, *local;

    List log;        /* what was changed since the last commit; each entry ends with its kind */
    Chain *replaced; /* the chains of these entries */
    size_t replaced_count, replaced_room;

    /* Room for work that is done with before a function returns. */
    List missing, queue, dirty, changed;
    Chain now;
    int32_t *new_spans, *last, *made;
    int64_t *levels;
    size_t levels_room;
    uint8_t *is_dying, *is_queued;
    Marks seen, demanded, ready, chained, is_dirty, is_changed;

    uint32_t random[624];
    int32_t random_place;
    int64_t changes; /* of states, since the search was last asked to go on */

    Point *points; /* the archive: ascending peaks, descending ticks */
    size_t point_count, point_room;
} Core;

/* At the head of a call: if an allocation fails inside, the call ends here. */
#define CATCH_FAILURE(core)       \
    if (setjmp((core)->failure)) { \
        (core)->is_broken = 1;    \
        return NO_MEMORY;         \
    }

/* ledger.c */
int32_t gap_at(const Core *core, int32_t value, int32_t op);
void set_state(Core *core, int32_t gap, uint8_t state);
void commit(Core *core);
void roll_back(Core *core);
void load(Core *core, const uint8_t *states);
void *room_for(Core *core, void *old, size_t count, size_t size);

#endif
