// Streams of the stand-in: a thread and a queue each, and what is known about their order.
//
// Each job has a tick, its number on its stream. A *clock* holds, for each stream, the last tick that is certain to be
// done before whatever comes next. A stream's clock grows with its own jobs and with the events that it waits for; the
// host's clock with each synchronisation, and it is part of every stream's clock from the next launch on. If a job
// touches memory that a job of another stream touched, one of them writing, and its stream's clock does not hold that
// tick, then a wait is missing. This is noted as a fault whether or not the threads happened to run in the wrong order.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <Python.h>

namespace standin {

constexpr int kDevices = 2;
constexpr int kStreams = 17;  // of each device: the default one, then a pool that is handed out in turn

using Clock = std::array<uint64_t, kDevices * kStreams>;

inline void merge(Clock& into, const Clock& other) {
  for (size_t i = 0; i < into.size(); i++) into[i] = std::max(into[i], other[i]);
}

// Lets Python run while this thread waits: a kernel may be Python too.
struct WithoutGil {
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() {
    if (state) PyEval_RestoreThread(state);
  }
};

struct Job {
  std::string name;
  std::function<void()> run;
  bool may_be_late;
};

class Stream {
 public:
  const int number;
  uint64_t launched = 0;  // with `clock`: of the host, under the lock of the world
  Clock clock{};

  explicit Stream(int number) : number(number), late_(number) {}

  void push(Job job) {
    std::unique_lock lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    queue_.push_back(std::move(job));
    changed_.notify_all();
  }

  bool has_done(uint64_t tick) {
    std::unique_lock lock(mutex_);
    return done_ >= tick;
  }

  void wait_for(uint64_t tick) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= tick; });
  }

  void delay(int64_t most_microseconds, int64_t seed) {
    std::unique_lock lock(mutex_);
    most_microseconds_ = most_microseconds;
    late_.seed(seed + number);
  }

  void hold(bool held) {  // begin no job until it is released
    std::unique_lock lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }

  std::string take_error() {
    std::unique_lock lock(mutex_);
    return std::exchange(error_, "");
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> queue_;
  std::thread thread_;
  uint64_t done_ = 0;
  bool held_ = false;
  int64_t most_microseconds_ = 0;
  std::minstd_rand late_;
  std::string error_;

  void work();  // in device.cpp: it sets up PyTorch's state of the thread
};

struct Access {
  uintptr_t from, to;
  bool is_write;
};

// One allocation, on the device or pinned, and the jobs that touched it since the host last knew them done.
struct Span {
  size_t size;
  int stream;  // that it was allocated on, or -1 if pinned
  struct Touch {
    uintptr_t from, to;
    bool is_write;
    int stream;
    uint64_t tick;
    std::string name;
  };
  std::vector<Touch> touches{};
};

class Order {
 public:
  Clock host{};
  std::map<uintptr_t, Span> spans;  // by their first address
  std::vector<std::string> faults;

  Span* span_of(uintptr_t address) {
    auto after = spans.upper_bound(address);
    if (after == spans.begin()) return nullptr;
    auto& [from, span] = *--after;
    return address < from + span.size ? &span : nullptr;
  }

  void touch(const std::string& name, const Stream& stream, const Access& access) {
    Span* span = span_of(access.from);
    if (!span) return;
    auto& touches = span->touches;
    for (const auto& other : touches) {
      const bool overlaps = other.from < access.to && access.from < other.to;
      if (!overlaps || !(other.is_write || access.is_write) || stream.clock[other.stream] >= other.tick) continue;
      std::ostringstream text;
      text << name << " on stream " << stream.number << (access.is_write ? " writes" : " reads") << " memory that "
           << other.name << " on stream " << other.stream << (other.is_write ? " wrote" : " read")
           << ", and nothing makes it wait";
      faults.push_back(text.str());
    }
    std::erase_if(touches, [&](const Span::Touch& other) {
      const bool is_inside = access.from <= other.from && other.to <= access.to;
      const bool is_known = host[other.stream] >= other.tick;
      return is_known || (is_inside && (access.is_write || (!other.is_write && other.stream == stream.number)));
    });
    touches.push_back({access.from, access.to, access.is_write, stream.number, stream.launched, name});
  }

  // A block that is freed is used again on its own stream, which must come after all that touched it.
  void end(uintptr_t address, const Clock& own, const std::vector<int>& recorded) {
    auto found = spans.find(address);
    for (const auto& touch : found->second.touches) {
      const bool is_recorded = std::find(recorded.begin(), recorded.end(), touch.stream) != recorded.end();
      if (is_recorded || own[touch.stream] >= touch.tick) continue;
      std::ostringstream text;
      text << "memory was freed while " << touch.name << " on stream " << touch.stream
           << " may still use it: neither a wait nor record_stream";
      faults.push_back(text.str());
    }
    spans.erase(found);
  }
};

}  // namespace standin
