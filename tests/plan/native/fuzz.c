/* Looks for faults of the core by chance: `fuzz FROM SECONDS FEWEST`, seeds from FROM on, at least FEWEST.

   A seed draws a problem, mostly a damaged one, and calls everything in any order; in some seeds allocations
   fail. Sanitizers see what is read or written out of bounds. The ledger is compared with one that loads the
   same schedule at once, and the archive with its own rules. Prints each seed; ends at the first fault. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int64_t allocations_left = INT64_MAX;

static int is_refused(void) { return allocations_left-- <= 0; }
static void *some_calloc(size_t count, size_t size) { return is_refused() ? NULL : calloc(count, size); }
static void *some_realloc(void *old, size_t size) { return is_refused() ? NULL : realloc(old, size); }

#define calloc some_calloc
#define realloc some_realloc
#include "ledger.c"
#include "search.c"
#undef calloc
#undef realloc

static uint64_t drawn;

static uint32_t draw(uint32_t limit) {
    drawn = drawn * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return limit ? (uint32_t)(drawn >> 33) % limit : 0;
}

static void expect(int is_right, const char *what) {
    if (is_right) return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

/* Arrays of exactly the length that a problem says, so that a sanitizer sees the first read beyond. */
static void *kept[32];
static size_t kept_count;

static void *keep(size_t count, size_t size) {
    void *made = malloc(count ? count * size : 1);
    expect(made != NULL, "no memory for the fuzzer itself");
    return kept[kept_count++] = made;
}

typedef struct {
    int32_t *starts, *items, rows, count;
} Rows;

static Rows rows_of(int32_t rows, int32_t most) {
    Rows made = {NULL, NULL, 0, 0};
    made.starts = keep((size_t)rows + 1, sizeof *made.starts);
    made.items = keep((size_t)rows * (size_t)most, sizeof *made.items);
    made.starts[0] = 0;
    return made;
}

static void add(Rows *rows, int32_t item) {
    for (int32_t i = rows->starts[rows->rows]; i < rows->count; i++)
        if (rows->items[i] == item) return;
    rows->items[rows->count++] = item;
}

static void end_row(Rows *rows) { rows->starts[++rows->rows] = rows->count; }

/* The items again in an array of exactly their number. */
static Table table_of(Rows rows) {
    int32_t *items = keep((size_t)rows.count, sizeof *items);
    if (rows.count) memcpy(items, rows.items, (size_t)rows.count * sizeof *items);
    return (Table){rows.starts, items, rows.count};
}

/* A step: op i makes value i; forward ops read earlier values, backward ones any. */
static Problem problem_of(void) {
    int32_t ops = 2 + (int32_t)draw(draw(2) ? 12 : 60), turn = 1 + (int32_t)draw((uint32_t)ops);
    int32_t values = ops + (int32_t)draw(3); /* some come with the inputs */
    size_t count = (size_t)values;
    int64_t *nbytes = keep(count, 8), *temporary = keep((size_t)ops, 8), *ticks = keep((size_t)ops, 8);
    int32_t *producer = keep(count, 4);
    uint8_t *held = keep(count, 1), *droppable = keep(count, 1);
    Rows reads = rows_of(ops, 5), writes = rows_of(ops, 3);
    Rows targets = rows_of(ops, 1), victims = rows_of(ops, 2);
    for (int32_t value = 0; value < values; value++) {
        int32_t maker = value < ops ? value : (int32_t)draw((uint32_t)ops + 1) - 1;
        producer[value] = maker;
        nbytes[value] = draw(100);
        held[value] = draw(10) == 0;
        droppable[value] = 0 <= maker && maker < turn && !held[value] && draw(4) != 0;
    }
    for (int32_t op = 0; op < ops; op++) {
        temporary[op] = draw(3) ? 0 : draw(50);
        ticks[op] = draw(1000);
        for (uint32_t reader = draw(5); reader; reader--) {
            int32_t value = (int32_t)draw((uint32_t)values);
            if (producer[value] < op) add(&reads, value);
        }
        end_row(&reads);
        for (int32_t value = 0; value < values; value++)
            if (producer[value] == op) add(&writes, value);
        end_row(&writes);
        if (reads.starts[op + 1] > reads.starts[op] && draw(3) == 0) {
            add(&targets, op);
            add(&victims, reads.items[reads.starts[op]]);
            end_row(&victims);
        }
        end_row(&targets);
    }
    int32_t gaps = 0;
    for (int32_t value = 0; value < values; value++) gaps += droppable[value];
    for (int32_t i = 0; i < reads.count; i++) gaps += droppable[reads.items[i]];
    int32_t groups = 1 + (int32_t)draw(4), *group_of = keep((size_t)gaps, 4);
    Rows twins = rows_of(groups, gaps);
    for (int32_t gap = 0; gap < gaps; gap++) group_of[gap] = gap % groups;
    for (int32_t group = 0; group < groups; group++) {
        for (int32_t gap = group; gap < gaps; gap += groups) add(&twins, gap);
        end_row(&twins);
    }
    Problem problem = {
        ops, values, gaps, groups, turn, draw(1000), nbytes, temporary, ticks, producer, held, droppable,
        table_of(reads), table_of(writes), table_of(targets), table_of(victims), group_of, table_of(twins),
    };
    return problem;
}

/* A number that a problem may not have, at a random place. */
static void damage(Problem *problem) {
    uint32_t ops = (uint32_t)problem->ops, values = (uint32_t)problem->values, gaps = (uint32_t)problem->gaps;
    int32_t wrong[] = {
        -1, -2, INT32_MIN, INT32_MAX, problem->ops, problem->values, problem->gaps, (int32_t)draw(9),
    };
    int32_t number = wrong[draw(8)];
    int64_t large = number * (INT64_C(1) << draw(31));
    Table *tables[] = {
        &problem->reads, &problem->writes, &problem->targets, &problem->victims, &problem->twins,
    };
    uint32_t rows[] = {ops, ops, ops, (uint32_t)problem->targets.count, (uint32_t)problem->groups};
    uint32_t which = draw(5);
    int32_t *starts = (int32_t *)tables[which]->starts, *items = (int32_t *)tables[which]->items;
    switch (draw(12)) {
        case 0: problem->turn = number; break;
        case 1: ((int64_t *)problem->nbytes)[draw(values)] = large; break;
        case 2: ((int64_t *)problem->ticks)[draw(ops)] = large; break;
        case 3: ((int64_t *)problem->temporary_bytes)[draw(ops)] = large; break;
        case 4: ((int32_t *)problem->producer)[draw(values)] = number; break;
        case 5: ((uint8_t *)problem->droppable)[draw(values)] ^= 1; break;
        case 6: problem->standing_bytes = large; break;
        case 7: if (tables[which]->count) items[draw((uint32_t)tables[which]->count)] = number; break;
        case 8: if (gaps) ((int32_t *)problem->group_of)[draw(gaps)] = number; break;
        case 9: starts[draw(rows[which] + 1)] = number; break;
        default: /* an op reads a value that may be made later */
            items = (int32_t *)problem->reads.items;
            if (problem->reads.count) items[draw((uint32_t)problem->reads.count)] = (int32_t)draw(values);
    }
}

/* Whether the call was done; if memory was refused, nothing else is. */
static int is_done(int code) {
    expect(code == DONE || code == NO_MEMORY, "a call was refused");
    return code == DONE;
}

static void compare_with_loaded(const Problem *problem, const Core *core) {
    size_t ops = (size_t)problem->ops, gaps = (size_t)problem->gaps;
    int64_t *curve = keep(ops, 8), *other = keep(ops, 8), ticks, other_ticks;
    uint8_t *states = keep(gaps, 1), *same = keep(gaps, 1);
    Core *loaded;
    int64_t left = allocations_left;
    allocations_left = INT64_MAX;
    stow_read(core, curve, states, &ticks);
    expect(stow_open(problem, &loaded) == DONE && stow_load(loaded, states) == DONE, "no second ledger");
    stow_read(loaded, other, same, &other_ticks);
    expect(!memcmp(curve, other, ops * 8) && ticks == other_ticks, "other accounts");
    expect(!memcmp(states, same, gaps), "other states");
    stow_close(loaded);
    allocations_left = left;
    kept_count -= 4;
    for (size_t i = 0; i < 4; i++) free(kept[kept_count + i]);
}

static void check_archive(const Core *core) {
    for (size_t i = 1; i < core->point_count; i++) {
        const Point *below = &core->points[i - 1], *point = &core->points[i];
        expect(below->peak < point->peak && below->ticks > point->ticks, "a point that another beats");
    }
}

/* Calls in any order; returns when memory is refused. */
static void call_all(const Problem *problem, Core *core) {
    double budgets[40];
    uint32_t seed[625];
    uint8_t *states = keep((size_t)problem->gaps, 1);
    for (size_t i = 0; i < 625; i++) seed[i] = i < 624 ? draw(UINT32_MAX) : 624;
    stow_seed(core, seed);
    for (int turn = 0; turn < 30; turn++) {
        int64_t peak, place = 0;
        int32_t op, value = 0;
        switch (problem->gaps ? draw(7) : 6) {
            case 0:
            case 1:
                for (uint32_t i = draw(4); i; i--) {
                    int32_t gap = (int32_t)draw((uint32_t)problem->gaps);
                    if (!is_done(stow_set_state(core, gap, (int32_t)draw(STATES)))) return;
                }
                break;
            case 2: stow_commit(core); break;
            case 3: if (!is_done(stow_roll_back(core))) return; break;
            case 4:
                for (int32_t gap = 0; gap < problem->gaps; gap++) states[gap] = (uint8_t)draw(STATES);
                if (!is_done(stow_load(core, states))) return;
                break;
            case 5:
                stow_commit(core);
                for (int i = 0; i < 40; i++) budgets[i] = draw(2000);
                while (place < 40)
                    if (!is_done(stow_anneal(core, budgets, 40, &place, draw(100), draw(3)))) return;
                break;
            default:
                stow_commit(core);
                while (value < problem->values)
                    if (!is_done(stow_keep_what_fits(core, draw(2000), &value))) return;
                if (!is_done(stow_look(core, &peak, &op))) return;
        }
        compare_with_loaded(problem, core);
        check_archive(core);
    }
}

static void run(uint64_t seed) {
    drawn = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    Problem problem = problem_of();
    int is_damaged = draw(3) != 0;
    if (is_damaged) damage(&problem);
    if (draw(3) == 0) allocations_left = draw(200);
    Core *core;
    int code = stow_open(&problem, &core);
    expect((code == DONE) == (core != NULL), "a core, or a reason");
    expect(code != BAD_PROBLEM || is_damaged, "a legal problem was refused");
    if (code == DONE) call_all(&problem, core);
    stow_close(core);
    allocations_left = INT64_MAX;
    while (kept_count) free(kept[--kept_count]);
}

int main(int count, char **words) {
    if (count != 4) return 2;
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ); /* the seed is known however the process ends */
    uint64_t seed = strtoull(words[1], NULL, 10), fewest = seed + strtoull(words[3], NULL, 10);
    time_t end = time(NULL) + atol(words[2]);
    for (; seed < fewest || time(NULL) < end; seed++) {
        printf("%llu\n", (unsigned long long)seed);
        run(seed);
    }
    return 0;
}
