/* The moves and the archive of `plan/annealing.py`, with the random numbers of Python's `random.Random`. */
#include "core.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define AT_PEAK 0.7 /* these three as in plan/annealing.py */
#define ALONE 0.1
#define TWINS 0.05
#define MOVES_AT_ONCE 256 /* so that Python looks at the time and at Ctrl-C between */
#define CHANGES_AT_ONCE 4096

/* ---- random numbers ---- */

static uint32_t twisted(uint32_t high, uint32_t low) {
    uint32_t mixed = (high & 0x80000000U) | (low & 0x7fffffffU);
    return (mixed >> 1) ^ (mixed & 1U ? 0x9908b0dfU : 0U);
}

/* The next 32 bits of the Mersenne Twister MT19937. */
static uint32_t random_bits(Core *core) {
    uint32_t *state = core->random;
    if (core->random_place >= 624) {
        for (int i = 0; i < 624; i++)
            state[i] = state[(i + 397) % 624] ^ twisted(state[i], state[(i + 1) % 624]);
        core->random_place = 0;
    }
    uint32_t bits = state[core->random_place++];
    bits ^= bits >> 11;
    bits ^= (bits << 7) & 0x9d2c5680U;
    bits ^= (bits << 15) & 0xefc60000U;
    return bits ^ (bits >> 18);
}

/* Random.random() */
static double random_share(Core *core) {
    uint32_t high = random_bits(core) >> 5, low = random_bits(core) >> 6;
    return (high * 67108864.0 + low) * (1.0 / 9007199254740992.0);
}

/* Random.randrange(limit), for a limit above 0 */
static int32_t random_below(Core *core, int32_t limit) {
    int bits = 0;
    uint32_t number;
    for (uint32_t rest = (uint32_t)limit; rest; rest >>= 1) bits++;
    do number = random_bits(core) >> (32 - bits);
    while (number >= (uint32_t)limit);
    return (int32_t)number;
}

/* The state of a Random: `getstate()[1]`. */
API int stow_seed(Core *core, const uint32_t *state) {
    if (core->is_broken || state[624] > 624) return BAD_CALL;
    memcpy(core->random, state, sizeof core->random);
    core->random_place = (int32_t)state[624];
    return DONE;
}

/* ---- the archive ---- */

/* How many points have at most this peak. */
static size_t reached(const Core *core, int64_t peak) {
    size_t low = 0, high = core->point_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (core->points[middle].peak <= peak) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Put the present schedule at `place`, instead of the points there that it beats. */
static void file_point(Core *core, size_t place, int64_t peak) {
    size_t end = place, gaps = (size_t)core->problem.gaps;
    while (end < core->point_count && core->points[end].ticks >= core->extra_ticks) end++;
    if (place && core->points[place - 1].peak == peak) place--;
    if (core->point_count == core->point_room) {
        size_t room = 2 * core->point_room + 256;
        core->points = room_for(core, core->points, room, sizeof *core->points);
        core->point_room = room;
    }
    uint8_t *states = place < end ? core->points[place].states : room_for(core, NULL, gaps, 1);
    for (size_t beaten = place + 1; beaten < end; beaten++) free(core->points[beaten].states);
    memmove(core->points + place + 1, core->points + end, (core->point_count - end) * sizeof *core->points);
    core->point_count += place + 1 - end;
    memcpy(states, core->states, gaps);
    core->points[place] = (Point){peak, core->extra_ticks, states};
}

/* The present peak and, in `*op`, its op; a schedule that nothing beats goes into the archive. */
static int64_t look(Core *core, int32_t *op) {
    int64_t highest = INT64_MIN;
    *op = 0;
    if (core->problem.ops == 0) return 0;
    for (int32_t i = 0; i < core->problem.ops; i++) {
        int64_t here = core->through[i] + core->local[i];
        if (here > highest) {
            highest = here;
            *op = i;
        }
    }
    int64_t peak = highest + core->problem.standing_bytes;
    size_t place = reached(core, peak);
    if (place == 0 || core->points[place - 1].ticks > core->extra_ticks) file_point(core, place, peak);
    return peak;
}

/* ---- moves ---- */

static int is_across(const Core *core, int32_t gap, int32_t op) {
    return core->gap_starts[gap] < op && op < core->gap_ends[gap];
}

static int32_t pick(Core *core, int32_t peak_op) {
    if (peak_op != NEVER && random_share(core) < AT_PEAK) {
        int32_t count = 0;
        for (int32_t gap = 0; gap < core->problem.gaps; gap++) count += is_across(core, gap, peak_op);
        if (count) {
            int32_t skipped = random_below(core, count), gap = 0;
            while (!is_across(core, gap, peak_op) || skipped--) gap++;
            return gap;
        }
    }
    return random_below(core, core->problem.gaps);
}

static void change_to(Core *core, int32_t gap, uint8_t state) {
    if (core->states[gap] != state) set_state(core, gap, state);
}

static void change_whole_value(Core *core, int32_t gap, uint8_t state) {
    int32_t value = core->value_of[gap];
    uint8_t after = state == EACH ? EACH : KEEP;
    for (int32_t i = core->first[value]; i < core->first[value + 1]; i++)
        change_to(core, i, i < gap ? KEEP : i == gap ? state : after);
}

/* Decide otherwise about a value or a gap, perhaps with its twins; returns for how many. */
static int32_t change(Core *core, int32_t peak_op) {
    int32_t picked = pick(core, peak_op);
    int alone = random_share(core) < ALONE;
    if (!alone) picked = gap_at(core, core->value_of[picked], core->problem.turn);
    uint8_t choices[STATES], usual = alone ? STATES : AHEAD;
    int32_t count = 0;
    for (uint8_t state = KEEP; state < usual; state++)
        if (state != core->states[picked]) choices[count++] = state;
    uint8_t state = choices[random_below(core, count)];
    const int32_t *twins = &picked;
    int32_t alike = 1;
    if (random_share(core) < TWINS) {
        const Table *groups = &core->problem.twins;
        int32_t group = core->problem.group_of[picked];
        twins = groups->items + groups->starts[group];
        alike = groups->starts[group + 1] - groups->starts[group];
    }
    for (int32_t i = 0; i < alike; i++) {
        if (alone) change_to(core, twins[i], state);
        else change_whole_value(core, twins[i], state);
    }
    return alike;
}

static double price_of(const Core *core, int64_t peak, double budget, double penalty) {
    double over = (double)peak - budget;
    return (double)core->extra_ticks + penalty * (over > 0.0 ? over : 0.0);
}

static void anneal(
    Core *core, const double *budgets, int64_t count, int64_t *place, double temperature, double penalty
) {
    int32_t op, new_op;
    int64_t peak = look(core, &op);
    for (int moves = 0; *place < count && moves < MOVES_AT_ONCE && core->changes < CHANGES_AT_ONCE; moves++) {
        double budget = budgets[*place], before = price_of(core, peak, budget, penalty);
        *place += change(core, (double)peak > budget ? op : NEVER);
        int64_t new_peak = look(core, &new_op);
        double worse = price_of(core, new_peak, budget, penalty) - before;
        if (worse <= 0.0 || (temperature > 0.0 && random_share(core) < exp(-worse / temperature))) {
            peak = new_peak;
            op = new_op;
            commit(core);
        } else {
            roll_back(core);
        }
    }
}

static int is_dropped(const Core *core, int32_t value) {
    for (int32_t gap = core->first[value]; gap < core->first[value + 1]; gap++)
        if (core->states[gap] != KEEP) return 1;
    return 0;
}

static void keep_what_fits(Core *core, int64_t budget, int32_t *value) {
    int32_t op;
    for (; *value < core->problem.values && core->changes < CHANGES_AT_ONCE; ++*value) {
        int64_t before = core->extra_ticks;
        if (!is_dropped(core, *value)) continue;
        for (int32_t gap = core->first[*value]; gap < core->first[*value + 1]; gap++)
            change_to(core, gap, KEEP);
        if (look(core, &op) <= budget && core->extra_ticks < before) commit(core);
        else roll_back(core);
    }
}

/* ---- what Python calls ---- */

API int stow_look(Core *core, int64_t *peak, int32_t *op) {
    if (core->is_broken) return BAD_CALL;
    CATCH_FAILURE(core)
    *peak = look(core, op);
    return DONE;
}

/* Moves for the budgets from `*place` on; it returns early, with the next place there. */
API int stow_anneal(
    Core *core, const double *budgets, int64_t count, int64_t *place, double temperature, double penalty
) {
    if (core->is_broken || core->problem.gaps == 0 || *place < 0) return BAD_CALL;
    CATCH_FAILURE(core)
    core->changes = 0;
    anneal(core, budgets, count, place, temperature, penalty);
    return DONE;
}

/* Keep the values from `*value` on that can be kept within a budget; it returns early, like stow_anneal. */
API int stow_keep_what_fits(Core *core, int64_t budget, int32_t *value) {
    if (core->is_broken || *value < 0) return BAD_CALL;
    CATCH_FAILURE(core)
    core->changes = 0;
    keep_what_fits(core, budget, value);
    return DONE;
}

API int64_t stow_point_count(const Core *core) { return (int64_t)core->point_count; }

/* The peaks and ticks of all points. */
API void stow_read_points(const Core *core, int64_t *peaks, int64_t *ticks) {
    for (size_t i = 0; i < core->point_count; i++) {
        peaks[i] = core->points[i].peak;
        ticks[i] = core->points[i].ticks;
    }
}

/* How many points have at most this peak: the last of them is the fastest within it. */
API int64_t stow_points_within(const Core *core, int64_t peak) { return (int64_t)reached(core, peak); }

API int stow_read_point(const Core *core, int64_t place, int64_t *ticks, uint8_t *states) {
    if (place < 0 || place >= (int64_t)core->point_count) return BAD_CALL;
    *ticks = core->points[place].ticks;
    memcpy(states, core->points[place].states, (size_t)core->problem.gaps);
    return DONE;
}
