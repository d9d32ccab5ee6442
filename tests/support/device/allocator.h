// The caching allocator of the stand-in: the rules of src/stowplan/plan/allocator/caching.py at PyTorch's default
// settings, written a second time. A test gives both the same requests and compares every segment and block.
//
// Addresses are offsets into the device's memory. New segments follow each other and no offset is used twice, so that
// released memory is never mistaken for another segment.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace standin {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kSmallestBlock = 512;
constexpr size_t kSmallRequest = kMiB;
constexpr size_t kSmallSegment = 2 * kMiB;
constexpr size_t kLargeSegment = 20 * kMiB;
constexpr size_t kOwnSegment = 10 * kMiB;

inline size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

enum class State { kFree, kAllocated, kWaiting };

struct Block {
  size_t address, size;
  int stream;
  bool is_small;
  State state = State::kFree;
  size_t requested = 0;
  Block* before = nullptr;
  Block* after = nullptr;
  std::set<int> uses{};                                // other streams, by record_stream
  std::vector<std::pair<int, uint64_t>> pending{};     // stream and tick that a waiting block waits for
};

struct Count {
  int64_t current = 0, peak = 0;
  void add(int64_t amount) { peak = std::max(peak, current += amount); }
};

struct Counts {
  Count requested, allocated, active, reserved;
  int64_t retries = 0, ooms = 0;
  void reset_peaks() {
    for (Count* count : {&requested, &allocated, &active, &reserved}) count->peak = count->current;
  }
};

struct Full {  // no block, even after a retry
  size_t nbytes;
};

// What the allocator asks of the device.
struct Driver {
  std::function<uint64_t(int)> launched;           // tick of the last job on a stream
  std::function<bool(int, uint64_t)> passed;       // has a stream done this tick?
  std::function<void()> synchronize;               // wait for all streams
  std::function<void(size_t, size_t)> released;    // a segment went back
  std::function<void(const Block&)> freed;         // a block can be used again on its stream
};

class CachingAllocator {
 public:
  CachingAllocator(Driver driver, size_t capacity) : capacity(capacity), driver_(std::move(driver)) {}

  size_t capacity;
  Counts counts;

  Block& malloc(size_t nbytes, int stream) {
    poll();
    const size_t size = round_up(nbytes, kSmallestBlock);
    const bool is_small = size <= kSmallRequest;
    Block* block = fit(stream, is_small, size);
    if (!block) block = grow(stream, is_small, size);
    if (!block) {
      counts.retries++;
      empty_cache();
      block = grow(stream, is_small, size);
    }
    if (!block) {
      counts.ooms++;
      throw Full{nbytes};
    }
    const size_t rest = block->size - size;
    if (is_small ? rest >= kSmallestBlock : rest > kSmallRequest) list(cut(*block, size));
    block->state = State::kAllocated;
    block->requested = nbytes;
    counts.requested.add(nbytes);
    counts.allocated.add(block->size);
    counts.active.add(block->size);
    return *block;
  }

  void free(size_t address) {
    Block& block = *blocks_.at(address);
    counts.allocated.add(-int64_t(block.size));
    counts.requested.add(-int64_t(block.requested));
    if (block.uses.empty()) return release(block);
    block.state = State::kWaiting;
    for (int stream : block.uses) block.pending.emplace_back(stream, driver_.launched(stream));
    block.uses.clear();
    waiting_.push_back(&block);
  }

  Block& at(size_t address) { return *blocks_.at(address); }

  void empty_cache() {
    driver_.synchronize();
    poll();
    for (auto& heap : free_) {
      auto keys = heap.second;
      for (auto [size, address] : keys) {
        Block& block = *blocks_.at(address);
        if (block.before || block.after) continue;
        heap.second.erase({size, address});
        counts.reserved.add(-int64_t(size));
        driver_.released(address, size);
        blocks_.erase(address);
      }
    }
  }

  // For each segment: address, size, stream, is it small, number of blocks, then size, state and request of each.
  std::vector<int64_t> layout() const {
    std::vector<int64_t> found;
    for (auto& [address, block] : blocks_) {
      if (block->before) continue;
      std::vector<int64_t> inside;
      int64_t total = 0, number = 0;
      for (const Block* b = block.get(); b; b = b->after, number++) {
        total += b->size;
        inside.insert(inside.end(), {int64_t(b->size), int64_t(b->state), int64_t(b->requested)});
      }
      found.insert(found.end(), {int64_t(address), total, block->stream, block->is_small, number});
      found.insert(found.end(), inside.begin(), inside.end());
    }
    return found;
  }

 private:
  using Heap = std::set<std::pair<size_t, size_t>>;  // free blocks by size, then address
  Driver driver_;
  std::map<size_t, std::unique_ptr<Block>> blocks_;
  std::map<std::pair<int, bool>, Heap> free_;  // by stream and size class
  std::vector<Block*> waiting_;
  size_t end_ = 0;

  Heap& heap_of(const Block& block) { return free_[{block.stream, block.is_small}]; }
  void list(Block& block) { heap_of(block).insert({block.size, block.address}); }

  Block* fit(int stream, bool is_small, size_t size) {
    Heap& heap = free_[{stream, is_small}];
    auto found = heap.lower_bound({size, 0});
    if (found == heap.end()) return nullptr;
    Block* block = blocks_.at(found->second).get();
    heap.erase(found);
    return block;
  }

  Block* grow(int stream, bool is_small, size_t size) {
    const size_t taken = is_small ? kSmallSegment : size < kOwnSegment ? kLargeSegment : round_up(size, 2 * kMiB);
    if (counts.reserved.current + taken > capacity) return nullptr;
    auto block = std::make_unique<Block>(Block{end_, taken, stream, is_small});
    end_ += taken;
    counts.reserved.add(taken);
    return (blocks_[block->address] = std::move(block)).get();
  }

  Block& cut(Block& block, size_t size) {
    auto back = std::make_unique<Block>(Block{block.address + size, block.size - size, block.stream, block.is_small});
    back->before = &block;
    back->after = block.after;
    if (block.after) block.after->before = back.get();
    block.after = back.get();
    block.size = size;
    return *(blocks_[back->address] = std::move(back));
  }

  void release(Block& block) {
    counts.active.add(-int64_t(block.size));
    driver_.freed(block);
    block.state = State::kFree;
    block.requested = 0;
    Block* whole = &block;
    if (Block* before = block.before; before && before->state == State::kFree) {
      heap_of(*before).erase({before->size, before->address});
      whole = join(*before, block);
    }
    if (Block* after = whole->after; after && after->state == State::kFree) {
      heap_of(*after).erase({after->size, after->address});
      whole = join(*whole, *after);
    }
    list(*whole);
  }

  Block* join(Block& front, Block& back) {
    front.size += back.size;
    front.after = back.after;
    if (back.after) back.after->before = &front;
    blocks_.erase(back.address);
    return &front;
  }

  void poll() {
    auto has_passed = [&](auto& use) { return driver_.passed(use.first, use.second); };
    auto is_done = [&](Block* block) {
      return std::all_of(block->pending.begin(), block->pending.end(), has_passed);
    };
    std::vector<Block*> done;
    for (Block* block : waiting_)
      if (is_done(block)) done.push_back(block);
    for (Block* block : done) {
      waiting_.erase(std::find(waiting_.begin(), waiting_.end(), block));
      block->pending.clear();
      release(*block);
    }
  }
};

}  // namespace standin
