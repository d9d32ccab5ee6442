/* The ledger of `plan/ledger.py`: the memory curve of a schedule, exact while single decisions change. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

/* ---- memory ---- */

void *room_for(Core *core, void *old, size_t count, size_t size) {
    void *room = count > SIZE_MAX / 2 / size ? NULL : realloc(old, (count ? count : 1) * size);
    if (room == NULL) longjmp(core->failure, 1);
    return room;
}

static void *zeros(Core *core, size_t count, size_t size) {
    void *room = calloc(count ? count : 1, size);
    if (room == NULL) longjmp(core->failure, 1);
    return room;
}

static void reserve(Core *core, List *list, size_t more) {
    if (list->room - list->count >= more) return;
    size_t room = 2 * list->room + more + 4;
    list->at = room_for(core, list->at, room, sizeof *list->at);
    list->room = room;
}

static void push(Core *core, List *list, int32_t number) {
    reserve(core, list, 1);
    list->at[list->count++] = number;
}

static void assign(Core *core, List *list, const List *other) {
    list->count = 0;
    reserve(core, list, other->count);
    if (other->count) memcpy(list->at, other->at, other->count * sizeof *list->at);
    list->count = other->count;
}

static int is_equal(const List *one, const List *other) {
    return one->count == other->count &&
           (one->count == 0 || !memcmp(one->at, other->at, one->count * sizeof *one->at));
}

/* ---- ascending lists ---- */

/* How many of the numbers are below `number`. */
static size_t count_below(const int32_t *at, size_t count, int32_t number) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (at[middle] < number) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void insert(Core *core, List *list, int32_t number) {
    size_t place = count_below(list->at, list->count, number);
    if (place < list->count && list->at[place] == number) return;
    reserve(core, list, 1);
    memmove(list->at + place + 1, list->at + place, (list->count - place) * sizeof *list->at);
    list->at[place] = number;
    list->count++;
}

static void discard(List *list, int32_t number) {
    size_t place = count_below(list->at, list->count, number);
    if (place == list->count || list->at[place] != number) return;
    memmove(list->at + place, list->at + place + 1, (list->count - place - 1) * sizeof *list->at);
    list->count--;
}

static int by_number(const void *one, const void *other) {
    int32_t a = *(const int32_t *)one, b = *(const int32_t *)other;
    return (a > b) - (a < b);
}

static void sort(List *list) {
    if (list->count > 24) {
        qsort(list->at, list->count, sizeof *list->at, by_number);
        return;
    }
    for (size_t i = 1; i < list->count; i++) {
        int32_t number = list->at[i];
        size_t place = i;
        for (; place && list->at[place - 1] > number; place--) list->at[place] = list->at[place - 1];
        list->at[place] = number;
    }
}

/* Walk two ascending lists side by side. Returns whether there is another number, and which lists have it. */
typedef struct {
    const List *one, *other;
    size_t i, j;
    int32_t number;
    int in_one, in_other;
} Both;

static int next_of(Both *both) {
    int more_one = both->i < both->one->count, more_other = both->j < both->other->count;
    if (!more_one && !more_other) return 0;
    both->in_one = more_one && (!more_other || both->one->at[both->i] <= both->other->at[both->j]);
    both->in_other = more_other && (!more_one || both->other->at[both->j] <= both->one->at[both->i]);
    both->number = both->in_one ? both->one->at[both->i] : both->other->at[both->j];
    both->i += (size_t)both->in_one;
    both->j += (size_t)both->in_other;
    return 1;
}

/* ---- sets of numbers ---- */

/* Whether the number was not marked before. */
static int mark(Marks *marks, int32_t number) {
    if (marks->stamps[number] == marks->now) return 0;
    marks->stamps[number] = marks->now;
    return 1;
}

static int is_marked(const Marks *marks, int32_t number) { return marks->stamps[number] == marks->now; }

static void mark_dirty(Core *core, int32_t value) {
    if (mark(&core->is_dirty, value)) push(core, &core->dirty, value);
}

static void mark_changed(Core *core, int32_t op) {
    if (0 <= op && op < core->problem.ops && mark(&core->is_changed, op)) push(core, &core->changed, op);
}

/* ---- the queue of ops whose chains may change: a heap, the first op on top, each op once ---- */

static void enqueue(Core *core, int32_t op) {
    List *queue = &core->queue;
    if (core->is_queued[op]) return;
    push(core, queue, op);
    core->is_queued[op] = 1;
    size_t place = queue->count - 1;
    while (place) {
        size_t parent = (place - 1) / 2;
        if (queue->at[parent] <= op) break;
        queue->at[place] = queue->at[parent];
        place = parent;
    }
    queue->at[place] = op;
}

static int32_t dequeue(Core *core) {
    List *queue = &core->queue;
    int32_t top = queue->at[0], moved = queue->at[--queue->count];
    core->is_queued[top] = 0;
    size_t place = 0, child;
    while ((child = 2 * place + 1) < queue->count) {
        if (child + 1 < queue->count && queue->at[child + 1] < queue->at[child]) child++;
        if (queue->at[child] >= moved) break;
        queue->at[place] = queue->at[child];
        place = child;
    }
    if (queue->count) queue->at[place] = moved;
    return top;
}

/* ---- gaps ---- */

static int32_t use_count(const Core *core, int32_t value) {
    return core->use_starts[value + 1] - core->use_starts[value];
}

int32_t gap_at(const Core *core, int32_t value, int32_t op) {
    const int32_t *uses = core->uses + core->use_starts[value];
    return core->first[value] + (int32_t)count_below(uses, (size_t)use_count(core, value), op) - 1;
}

static int32_t start_of(const Core *core, int32_t gap) {
    int32_t value = core->value_of[gap];
    return core->uses[core->use_starts[value] + gap - core->first[value]];
}

static int32_t next_use(const Core *core, int32_t gap) {
    int32_t value = core->value_of[gap], place = core->use_starts[value] + gap - core->first[value] + 1;
    return place < core->use_starts[value + 1] ? core->uses[place] : NEVER;
}

static int is_available(const Core *core, int32_t value, int32_t op) {
    if (!core->problem.droppable[value]) return 1;
    int32_t gap = gap_at(core, value, op);
    switch (core->states[gap]) {
        case KEEP: return 1;
        case HOLD: return NEVER < core->remade[gap] && core->remade[gap] < op;
        case AHEAD: return next_use(core, gap) == op;
        default: return 0;
    }
}

static void enter_state(Core *core, int32_t gap, uint8_t state) {
    int32_t reader = next_use(core, gap), value = core->value_of[gap];
    if (reader != NEVER) {
        if (state == AHEAD) insert(core, &core->ahead[reader - 1], value);
        else discard(&core->ahead[reader - 1], value);
    }
    core->states[gap] = state;
}

/* Queue the ops after `after` that find the value in this gap. */
static void enqueue_touched(Core *core, int32_t gap, int32_t after) {
    int32_t reader = next_use(core, gap);
    const List *via = &core->via[core->value_of[gap]];
    if (reader != NEVER) enqueue(core, reader);
    for (size_t i = count_below(via->at, via->count, after + 1); i < via->count; i++) {
        if (reader != NEVER && via->at[i] >= reader) break;
        enqueue(core, via->at[i]);
    }
}

/* ---- the log ---- */

enum { A_STATE, A_REMAKE, A_CHAIN, A_SPANS, A_LOCAL };

static void note(Core *core, const int32_t *words, size_t count) {
    reserve(core, &core->log, count);
    memcpy(core->log.at + core->log.count, words, count * sizeof *words);
    core->log.count += count;
}

static int32_t noted(Core *core) { return core->log.at[--core->log.count]; }

void commit(Core *core) { core->log.count = core->replaced_count = 0; }

/* ---- chains ---- */

static void demand(Core *core, int32_t value) {
    if (!mark(&core->demanded, value)) return;
    push(core, &core->now.demanded, value);
    push(core, &core->missing, value);
}

/* Write into `core->now` which ops are recomputed before `op`. */
static void find_chain(Core *core, int32_t op) {
    const Problem *problem = &core->problem;
    Chain *now = &core->now;
    now->ops.count = now->demanded.count = now->involved.count = core->missing.count = 0;
    now->ticks = 0;
    core->demanded.now++, core->ready.now++, core->chained.now++;
    for (int32_t i = problem->reads.starts[op]; i < problem->reads.starts[op + 1]; i++) {
        int32_t value = problem->reads.items[i];
        if (!is_available(core, value, op)) demand(core, value);
    }
    for (size_t i = 0; i < core->ahead[op].count; i++) {
        int32_t value = core->ahead[op].at[i];
        if (problem->producer[value] != op && !is_available(core, value, op)) demand(core, value);
    }
    while (core->missing.count) {
        int32_t maker = problem->producer[core->missing.at[--core->missing.count]];
        if (!mark(&core->chained, maker)) continue;
        push(core, &now->ops, maker);
        now->ticks += problem->ticks[maker];
        for (int32_t i = problem->reads.starts[maker]; i < problem->reads.starts[maker + 1]; i++) {
            int32_t value = problem->reads.items[i];
            if (!is_available(core, value, op)) demand(core, value);
            else if (mark(&core->ready, value)) push(core, &now->involved, value);
        }
    }
    for (size_t i = 0; i < now->demanded.count; i++) push(core, &now->involved, now->demanded.at[i]);
    sort(&now->ops), sort(&now->demanded), sort(&now->involved);
}

/* Let `via` and the seconds follow a chain from `before` to `after`. */
static void rewire(Core *core, int32_t op, const Chain *before, const Chain *after) {
    Both both = {&before->involved, &after->involved, 0, 0, 0, 0, 0};
    while (next_of(&both)) {
        if (!both.in_other) discard(&core->via[both.number], op);
        if (!both.in_one) insert(core, &core->via[both.number], op);
    }
    core->extra_ticks += after->ticks - before->ticks;
}

/* Put `core->now` in the place of the op's chain, which goes into the log. */
static const Chain *replace_chain(Core *core, int32_t op) {
    if (core->replaced_count == core->replaced_room) {
        size_t room = 2 * core->replaced_room + 64;
        core->replaced = room_for(core, core->replaced, room, sizeof *core->replaced);
        size_t added = room - core->replaced_room;
        memset(core->replaced + core->replaced_room, 0, added * sizeof *core->replaced);
        core->replaced_room = room;
    }
    int32_t words[] = {op, A_CHAIN};
    note(core, words, 2);
    Chain *chain = &core->chains[op], *before = &core->replaced[core->replaced_count++];
    Chain spare = *before;
    *before = *chain;
    *chain = spare;
    assign(core, &chain->ops, &core->now.ops);
    assign(core, &chain->demanded, &core->now.demanded);
    assign(core, &chain->involved, &core->now.involved);
    chain->ticks = core->now.ticks;
    return before;
}

static void move_remake(Core *core, int32_t gap, int32_t op, int is_demanded) {
    if (is_demanded == (core->remade[gap] == op)) return;
    int32_t words[] = {gap, core->remade[gap], A_REMAKE};
    note(core, words, 3);
    core->remade[gap] = is_demanded ? op : NEVER;
    mark_dirty(core, core->value_of[gap]);
    enqueue_touched(core, gap, op);
}

/* Update the chain of `op`, and queue the later ops whose chains may change by it. */
static void rechain(Core *core, int32_t op) {
    find_chain(core, op);
    Chain *chain = &core->chains[op];
    const Chain *before = chain;
    if (!is_equal(&chain->ops, &core->now.ops) || !is_equal(&chain->demanded, &core->now.demanded) ||
        !is_equal(&chain->involved, &core->now.involved)) {
        before = replace_chain(core, op);
        Both both = {&before->involved, &chain->involved, 0, 0, 0, 0, 0};
        while (next_of(&both))
            if (!both.in_one || !both.in_other) mark_dirty(core, both.number);
        rewire(core, op, before, chain);
    }
    Both both = {&before->demanded, &chain->demanded, 0, 0, 0, 0, 0};
    while (next_of(&both)) {
        int32_t gap = gap_at(core, both.number, op);
        if (core->states[gap] == HOLD) move_remake(core, gap, op, both.in_other);
    }
}

/* ---- spans ---- */

static int32_t span_start(const Core *core, int32_t gap, int32_t use) {
    switch (core->states[gap]) {
        case KEEP: return use;
        case HOLD: return core->remade[gap];
        case AHEAD: return (next_use(core, gap) == NEVER ? 0 : next_use(core, gap)) - 1;
        default: return NEVER;
    }
}

/* Write the spans of a value into `core->new_spans`; returns how many. */
static int32_t find_spans(Core *core, int32_t value) {
    const int32_t *uses = core->uses + core->use_starts[value];
    const List *via = &core->via[value];
    int32_t count = use_count(core, value), *spans = core->new_spans, found = 0;
    int32_t latest = via->count ? via->at[via->count - 1] : NEVER;
    if (!core->problem.droppable[value]) {
        int32_t end = uses[count - 1] > latest ? uses[count - 1] : latest;
        spans[0] = uses[0];
        spans[1] = core->problem.held[value] ? core->problem.ops : end;
        return 1;
    }
    for (int32_t place = 0; place < count; place++) {
        int32_t end = place + 1 < count ? uses[place + 1] : latest;
        int32_t start = span_start(core, core->first[value] + place, uses[place]);
        if (start <= NEVER || start > end) continue;
        if (found && spans[2 * found - 1] == start) {
            spans[2 * found - 1] = end;
        } else {
            spans[2 * found] = start;
            spans[2 * found + 1] = end;
            found++;
        }
    }
    return found;
}

static void add_through(Core *core, const int32_t *spans, int32_t count, int64_t nbytes) {
    for (int32_t i = 0; i < count; i++)
        for (int32_t op = spans[2 * i] + 1; op < spans[2 * i + 1]; op++) core->through[op] += nbytes;
}

static void enter_spans(Core *core, int32_t value, const int32_t *spans, int32_t count) {
    const int32_t *uses = core->uses + core->use_starts[value];
    int32_t *before = core->spans + 2 * (ptrdiff_t)core->use_starts[value];
    int32_t gaps_end = core->first[value + 1];
    add_through(core, before, core->span_counts[value], -core->problem.nbytes[value]);
    add_through(core, spans, count, core->problem.nbytes[value]);
    if (count) memcpy(before, spans, 2 * (size_t)count * sizeof *spans);
    core->span_counts[value] = count;
    for (int32_t gap = core->first[value], place = 0; gap < gaps_end; gap++, place++) {
        int32_t start = uses[place], end = gap + 1 < gaps_end ? uses[place + 1] : core->problem.ops;
        core->gap_starts[gap] = core->gap_ends[gap] = NEVER;
        for (int32_t i = 0; i < count; i++) {
            if (spans[2 * i] >= end || spans[2 * i + 1] <= start) continue;
            core->gap_starts[gap] = spans[2 * i] > start ? spans[2 * i] : start;
            core->gap_ends[gap] = spans[2 * i + 1] < end ? spans[2 * i + 1] : end;
            break;
        }
    }
}

/* Mark the ops at which one of these spans begins or ends that is not among the others. */
static void mark_ends(
    Core *core, const int32_t *spans, int32_t count, const int32_t *others, int32_t other_count
) {
    for (int32_t i = 0; i < count; i++) {
        int32_t j = 0;
        while (j < other_count && memcmp(spans + 2 * i, others + 2 * j, 2 * sizeof *spans)) j++;
        if (j < other_count) continue;
        mark_changed(core, spans[2 * i]);
        mark_changed(core, spans[2 * i + 1]);
    }
}

static void rebook(Core *core, int32_t value) {
    int32_t count = find_spans(core, value), before_count = core->span_counts[value];
    const int32_t *before = core->spans + 2 * (ptrdiff_t)core->use_starts[value], *spans = core->new_spans;
    size_t words = 2 * (size_t)before_count;
    if (count == before_count && (count == 0 || !memcmp(spans, before, words * sizeof *spans))) return;
    int32_t ending[] = {before_count, value, A_SPANS};
    reserve(core, &core->log, words + 3);
    note(core, before, words);
    note(core, ending, 3);
    mark_ends(core, before, before_count, spans, count);
    mark_ends(core, spans, count, before, before_count);
    enter_spans(core, value, spans, count);
}

/* ---- what comes and goes at an op ---- */

/* Whether the copy of `value` that op or its chain uses is still there afterwards. */
static int outlives(const Core *core, int32_t value, int32_t op, int is_made_here) {
    const int32_t *spans = core->spans + 2 * (ptrdiff_t)core->use_starts[value];
    for (int32_t i = 0; i < core->span_counts[value]; i++) {
        int32_t start = spans[2 * i], end = spans[2 * i + 1];
        if (is_made_here ? start == op : start < op && op <= end) return end > op;
    }
    return 0;
}

/* The values of an op or its chain are listed in `missing` by the first that uses them. */
static void see(Core *core, int32_t value) {
    if (!mark(&core->seen, value)) return;
    push(core, &core->missing, value);
    core->made[value] = NEVER;
    core->is_dying[value] = 0;
}

/* Book when the values of an op and its chain begin and end: `levels[i]` is the change at number i. */
static void book_values(Core *core, int32_t op, int32_t length) {
    const Problem *problem = &core->problem;
    const Chain *chain = &core->chains[op];
    int64_t *levels = core->levels;
    core->demanded.now++, core->seen.now++;
    core->missing.count = 0;
    for (size_t i = 0; i < chain->demanded.count; i++) mark(&core->demanded, chain->demanded.at[i]);
    for (int32_t i = 0; i < length; i++) {
        int32_t running = i + 1 < length ? chain->ops.at[i] : op;
        for (int32_t k = problem->reads.starts[running]; k < problem->reads.starts[running + 1]; k++) {
            see(core, problem->reads.items[k]);
            core->last[problem->reads.items[k]] = i;
        }
        for (int32_t k = problem->writes.starts[running]; k < problem->writes.starts[running + 1]; k++) {
            int32_t value = problem->writes.items[k];
            if (running == op || is_marked(&core->demanded, value)) {
                see(core, value);
                core->made[value] = core->last[value] = i;
            } else { /* a second output that nothing misses: there and gone */
                levels[i] += problem->nbytes[value];
                levels[i + 1] -= problem->nbytes[value];
            }
        }
    }
    for (size_t i = 0; i < core->missing.count; i++) {
        int32_t value = core->missing.at[i];
        int is_made = core->made[value] != NEVER, stays = outlives(core, value, op, is_made);
        core->is_dying[value] = !stays;
        if (is_made || !stays) {
            levels[is_made ? core->made[value] : 0] += problem->nbytes[value];
            levels[stays ? length : core->last[value] + 1] -= problem->nbytes[value];
        }
    }
}

/* Whether an input ends at op `running`, number `place` of a chain, whose memory the target can take. */
static int overwrites(const Core *core, int32_t target_place, int32_t place) {
    const Table *victims = &core->problem.victims;
    int32_t target = core->problem.targets.items[target_place];
    if (!is_marked(&core->seen, target) || core->made[target] == NEVER) return 0;
    for (int32_t i = victims->starts[target_place]; i < victims->starts[target_place + 1]; i++) {
        int32_t value = victims->items[i];
        if (is_marked(&core->seen, value) && core->is_dying[value] && core->last[value] == place) return 1;
    }
    return 0;
}

static int64_t local_peak(Core *core, int32_t op) {
    const Problem *problem = &core->problem;
    const Chain *chain = &core->chains[op];
    int32_t length = (int32_t)chain->ops.count + 1;
    if (core->levels_room < (size_t)length + 1) {
        core->levels = room_for(core, core->levels, 2 * (size_t)length + 1, sizeof *core->levels);
        core->levels_room = 2 * (size_t)length + 1;
    }
    memset(core->levels, 0, ((size_t)length + 1) * sizeof *core->levels);
    book_values(core, op, length);
    int64_t level = 0, peak = 0;
    for (int32_t i = 0; i < length; i++) {
        int32_t running = i + 1 < length ? chain->ops.at[i] : op;
        level += core->levels[i];
        int64_t here = level + problem->temporary_bytes[running];
        for (int32_t k = problem->targets.starts[running]; k < problem->targets.starts[running + 1]; k++)
            if (overwrites(core, k, i)) here -= problem->nbytes[problem->targets.items[k]];
        if (here > peak) peak = here;
    }
    return peak;
}

/* ---- changes ---- */

void set_state(Core *core, int32_t gap, uint8_t state) {
    int32_t words[] = {core->remade[gap], core->states[gap], gap, A_STATE};
    note(core, words, 4);
    enter_state(core, gap, state);
    core->remade[gap] = NEVER;
    core->changes++;
    core->is_dirty.now++, core->is_changed.now++;
    core->dirty.count = core->changed.count = 0;
    enqueue_touched(core, gap, start_of(core, gap));
    if (next_use(core, gap) != NEVER) enqueue(core, next_use(core, gap) - 1);
    mark_dirty(core, core->value_of[gap]);
    while (core->queue.count) {
        int32_t op = dequeue(core);
        mark_changed(core, op);
        rechain(core, op);
    }
    for (size_t i = 0; i < core->dirty.count; i++) rebook(core, core->dirty.at[i]);
    for (size_t i = 0; i < core->changed.count; i++) {
        int32_t op = core->changed.at[i];
        int64_t peak = local_peak(core, op);
        if (peak == core->local[op]) continue;
        int32_t entry[] = {0, 0, op, A_LOCAL};
        memcpy(entry, &core->local[op], sizeof core->local[op]);
        note(core, entry, 4);
        core->local[op] = peak;
    }
}

void roll_back(Core *core) {
    while (core->log.count) {
        switch (noted(core)) {
            case A_STATE: {
                int32_t gap = noted(core);
                enter_state(core, gap, (uint8_t)noted(core));
                core->remade[gap] = noted(core);
                break;
            }
            case A_REMAKE: {
                int32_t before = noted(core);
                core->remade[noted(core)] = before;
                break;
            }
            case A_CHAIN: {
                int32_t op = noted(core);
                Chain *before = &core->replaced[--core->replaced_count], spare = core->chains[op];
                rewire(core, op, &spare, before);
                core->chains[op] = *before;
                *before = spare;
                break;
            }
            case A_SPANS: {
                int32_t value = noted(core), count = noted(core);
                core->log.count -= 2 * (size_t)count;
                enter_spans(core, value, core->log.at + core->log.count, count);
                break;
            }
            case A_LOCAL: {
                int32_t op = noted(core);
                core->log.count -= 2;
                memcpy(&core->local[op], core->log.at + core->log.count, sizeof core->local[op]);
                break;
            }
        }
    }
}

static void rebook_all(Core *core) {
    for (int32_t value = 0; value < core->problem.values; value++) rebook(core, value);
    for (int32_t op = 0; op < core->problem.ops; op++) core->local[op] = local_peak(core, op);
    commit(core);
}

void load(Core *core, const uint8_t *states) {
    for (int32_t gap = 0; gap < core->problem.gaps; gap++) {
        enter_state(core, gap, states[gap]);
        core->remade[gap] = NEVER;
    }
    core->is_dirty.now++, core->is_changed.now++;
    core->dirty.count = core->changed.count = 0;
    for (int32_t op = 0; op < core->problem.ops; op++) { /* later ops depend on what earlier ones hold */
        rechain(core, op);
        while (core->queue.count) dequeue(core);
    }
    rebook_all(core);
}

/* ---- opening and closing ---- */

#define MOST (1 << 24)                   /* ops, values, gaps: far more than any step has */
#define MOST_ITEMS (INT64_C(1) << 28)    /* of a table */
#define MOST_BYTES (INT64_C(1) << 53)    /* together: doubles hold them exactly */
#define MOST_TICKS (INT64_C(1) << 62)    /* if every op ran before every other */

static int is_table(const Table *table, int32_t rows, int32_t limit) {
    if (table->count < 0 || table->count > MOST_ITEMS || table->starts[0] != 0) return 0;
    for (int32_t row = 0; row < rows; row++)
        if (table->starts[row] > table->starts[row + 1]) return 0;
    if (table->starts[rows] != table->count) return 0;
    for (int64_t i = 0; i < table->count; i++)
        if (table->items[i] < 0 || table->items[i] >= limit) return 0;
    return 1;
}

/* Whether numbers from 0 on have a sum of at most `most`. */
static int is_bounded(const int64_t *numbers, int32_t count, int64_t most) {
    for (int32_t i = 0; i < count; i++) {
        if (numbers[i] < 0 || numbers[i] > most) return 0;
        most -= numbers[i];
    }
    return 1;
}

static int is_count(int32_t number) { return 0 <= number && number <= MOST; }

/* Whether all numbers are in range. The uses of values are checked when they are listed. */
static int is_safe(const Problem *problem) {
    int32_t ops = problem->ops, values = problem->values;
    if (!is_count(ops) || !is_count(values)) return 0;
    if (!is_count(problem->gaps) || !is_count(problem->groups)) return 0;
    if (problem->turn < 0 || problem->turn > ops) return 0;
    if (!is_table(&problem->reads, ops, values) || !is_table(&problem->writes, ops, values)) return 0;
    if (!is_table(&problem->targets, ops, values)) return 0;
    if (!is_table(&problem->victims, (int32_t)problem->targets.count, values)) return 0;
    if (!is_table(&problem->twins, problem->groups, problem->gaps)) return 0;
    for (int32_t gap = 0; gap < problem->gaps; gap++)
        if (problem->group_of[gap] < 0 || problem->group_of[gap] >= problem->groups) return 0;
    for (int32_t value = 0; value < values; value++) {
        int32_t maker = problem->producer[value];
        if (maker < NEVER || maker >= ops) return 0;
        if (problem->droppable[value] && (maker < 0 || maker >= problem->turn)) return 0;
    }
    return is_bounded(problem->nbytes, values, MOST_BYTES / 8) &&
           is_bounded(problem->temporary_bytes, ops, MOST_BYTES / 8) &&
           is_bounded(&problem->standing_bytes, 1, MOST_BYTES / 8) &&
           is_bounded(problem->ticks, ops, MOST_TICKS / (ops ? ops : 1));
}

/* List the uses of values and number their gaps; whether each is made before it is read. */
static int list_uses(Core *core) {
    const Problem *problem = &core->problem;
    int32_t values = problem->values;
    core->use_starts = zeros(core, (size_t)values + 1, sizeof *core->use_starts);
    core->first = zeros(core, (size_t)values + 1, sizeof *core->first);
    core->last = zeros(core, (size_t)values, sizeof *core->last); /* here: how many uses are listed */
    for (int64_t i = 0; i < problem->reads.count; i++) core->last[problem->reads.items[i]]++;
    for (int32_t value = 0; value < values; value++) {
        int32_t uses = 1 + core->last[value];
        core->use_starts[value + 1] = core->use_starts[value] + uses;
        core->first[value + 1] = core->first[value] + (problem->droppable[value] ? uses : 0);
        core->last[value] = 1;
    }
    if (core->first[values] != problem->gaps) return 0;
    core->uses = zeros(core, (size_t)core->use_starts[values], sizeof *core->uses);
    core->value_of = zeros(core, (size_t)problem->gaps, sizeof *core->value_of);
    for (int32_t value = 0; value < values; value++) {
        core->uses[core->use_starts[value]] = problem->producer[value];
        for (int32_t gap = core->first[value]; gap < core->first[value + 1]; gap++)
            core->value_of[gap] = value;
    }
    for (int32_t op = 0; op < problem->ops; op++) {
        for (int32_t i = problem->reads.starts[op]; i < problem->reads.starts[op + 1]; i++) {
            int32_t value = problem->reads.items[i], place = core->use_starts[value] + core->last[value]++;
            if (core->uses[place - 1] >= op) return 0;
            core->uses[place] = op;
        }
    }
    return 1;
}

static Marks no_marks(Core *core, int32_t count) {
    Marks marks = {zeros(core, (size_t)count, sizeof *marks.stamps), 1};
    return marks;
}

static void make_ledger(Core *core) {
    size_t ops = (size_t)core->problem.ops, values = (size_t)core->problem.values;
    size_t gaps = (size_t)core->problem.gaps;
    int32_t most_uses = 1;
    for (size_t value = 0; value < values; value++)
        if (use_count(core, (int32_t)value) > most_uses) most_uses = use_count(core, (int32_t)value);
    core->states = zeros(core, gaps, sizeof *core->states);
    core->remade = zeros(core, gaps, sizeof *core->remade);
    core->gap_starts = zeros(core, gaps, sizeof *core->gap_starts);
    core->gap_ends = zeros(core, gaps, sizeof *core->gap_ends);
    for (size_t gap = 0; gap < gaps; gap++)
        core->remade[gap] = core->gap_starts[gap] = core->gap_ends[gap] = NEVER;
    core->ahead = zeros(core, ops, sizeof *core->ahead);
    core->via = zeros(core, values, sizeof *core->via);
    core->chains = zeros(core, ops, sizeof *core->chains);
    core->span_counts = zeros(core, values, sizeof *core->span_counts);
    core->spans = zeros(core, 2 * (size_t)core->use_starts[values], sizeof *core->spans);
    core->through = zeros(core, ops, sizeof *core->through);
    core->local = zeros(core, ops, sizeof *core->local);
    core->new_spans = zeros(core, 2 * (size_t)most_uses, sizeof *core->new_spans);
    core->made = zeros(core, values, sizeof *core->made);
    core->is_dying = zeros(core, values, sizeof *core->is_dying);
    core->is_queued = zeros(core, ops, sizeof *core->is_queued);
    core->seen = no_marks(core, core->problem.values);
    core->demanded = no_marks(core, core->problem.values);
    core->ready = no_marks(core, core->problem.values);
    core->is_dirty = no_marks(core, core->problem.values);
    core->chained = no_marks(core, core->problem.ops);
    core->is_changed = no_marks(core, core->problem.ops);
    rebook_all(core);
}

API void stow_close(Core *core) {
    if (core == NULL) return;
    for (int32_t op = 0; op < core->problem.ops; op++) {
        if (core->ahead) free(core->ahead[op].at);
        if (core->chains) free(core->chains[op].ops.at);
        if (core->chains) free(core->chains[op].demanded.at);
        if (core->chains) free(core->chains[op].involved.at);
    }
    for (int32_t value = 0; core->via && value < core->problem.values; value++) free(core->via[value].at);
    for (size_t i = 0; i < core->replaced_room; i++) {
        free(core->replaced[i].ops.at);
        free(core->replaced[i].demanded.at);
        free(core->replaced[i].involved.at);
    }
    for (size_t i = 0; i < core->point_count; i++) free(core->points[i].states);
    void *owned[] = {
        core->use_starts, core->uses, core->first, core->value_of, core->states, core->remade, core->ahead,
        core->via, core->chains, core->span_counts, core->spans, core->gap_starts, core->gap_ends,
        core->through, core->local, core->log.at, core->replaced, core->missing.at, core->queue.at,
        core->dirty.at, core->changed.at, core->now.ops.at, core->now.demanded.at, core->now.involved.at,
        core->new_spans, core->last, core->made, core->levels, core->is_dying, core->is_queued,
        core->seen.stamps, core->demanded.stamps, core->ready.stamps, core->chained.stamps,
        core->is_dirty.stamps, core->is_changed.stamps, core->points, core,
    };
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
}

/* A ledger of the problem that keeps every value, in `*opened`; NULL there unless the result is DONE. */
API int stow_open(const Problem *problem, Core **opened) {
    *opened = NULL;
    if (!is_safe(problem)) return BAD_PROBLEM;
    Core *volatile core = calloc(1, sizeof(Core));
    if (core == NULL) return NO_MEMORY;
    core->problem = *problem;
    if (setjmp(core->failure)) {
        stow_close(core);
        return NO_MEMORY;
    }
    if (!list_uses(core)) {
        stow_close(core);
        return BAD_PROBLEM;
    }
    make_ledger(core);
    *opened = core;
    return DONE;
}

/* ---- what Python calls ---- */

API int stow_set_state(Core *core, int32_t gap, int32_t state) {
    if (core->is_broken || gap < 0 || gap >= core->problem.gaps) return BAD_CALL;
    if (state < 0 || state >= STATES) return BAD_CALL;
    CATCH_FAILURE(core)
    set_state(core, gap, (uint8_t)state);
    return DONE;
}

API int stow_commit(Core *core) {
    if (core->is_broken) return BAD_CALL;
    commit(core);
    return DONE;
}

API int stow_roll_back(Core *core) {
    if (core->is_broken) return BAD_CALL;
    CATCH_FAILURE(core)
    roll_back(core);
    return DONE;
}

API int stow_load(Core *core, const uint8_t *states) {
    if (core->is_broken) return BAD_CALL;
    for (int32_t gap = 0; gap < core->problem.gaps; gap++)
        if (states[gap] >= STATES) return BAD_CALL;
    CATCH_FAILURE(core)
    load(core, states);
    return DONE;
}

/* The schedule: the memory while each op or its chain runs, the state of each gap, the extra ticks. */
API int stow_read(const Core *core, int64_t *curve, uint8_t *states, int64_t *extra_ticks) {
    if (core->is_broken) return BAD_CALL;
    for (int32_t op = 0; op < core->problem.ops; op++)
        curve[op] = core->problem.standing_bytes + core->through[op] + core->local[op];
    memcpy(states, core->states, (size_t)core->problem.gaps);
    *extra_ticks = core->extra_ticks;
    return DONE;
}
