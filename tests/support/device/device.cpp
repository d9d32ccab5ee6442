// A stand-in for an accelerator, on PyTorch's key PrivateUse1.
//
// Memory. A device's memory is one file in memory, mapped twice. Tensors carry addresses of the first mapping, which
// nobody may read or write: the host faults there. Kernels run on the second one, the *twin*.
//
// Kernels. An op runs PyTorch's CPU kernel on the twins of its tensors, on the thread of the current stream. Shapes of
// outputs come from the op's Meta kernel, so the host goes on before the kernel begins. Ops without one, or with
// outputs that depend on values, are waited for. Freed memory and memory that is handed out are filled with 0xFF (NaN
// in floating point; at most the first MiB), in the order of the stream: what was freed too early or never written
// shows in the bits.
//
// Random numbers. A generator is a seed and a count of draws; each draw makes a CPU generator of its own from both.
#include "allocator.h"
#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <fcntl.h>
#include <omp.h>
#include <sys/mman.h>
#include <unistd.h>

namespace standin {

using at::Tensor;
using torch::jit::Stack;

constexpr size_t kAddresses = size_t{256} << 30;  // of one device; pages exist once they are used
constexpr size_t kCapacity = size_t{2} << 30;     // unless `set_capacity` says otherwise
constexpr auto kType = c10::DeviceType::PrivateUse1;

thread_local int current_device = 0;
thread_local std::array<int, kDevices> current_streams{};

// The world: two devices, their streams, and one lock for all that the host knows.

struct Device {
  char* memory;
  std::ptrdiff_t to_twin;
  int file;
  std::unique_ptr<CachingAllocator> allocator;
  int handed_out = 0;  // streams of the pool
};

struct World {
  std::mutex mutex;
  std::array<Device, kDevices> devices;
  std::array<std::unique_ptr<Stream>, kDevices * kStreams> streams;
  Order order;
  std::map<uintptr_t, size_t> pinned;
  std::vector<std::tuple<char*, size_t, std::vector<Span::Touch>>> pinned_once;

  World();
};

World& world() {
  static World* one = new World;  // never destroyed: threads and tensors may outlive main
  return *one;
}

struct Locked {
  std::unique_lock<std::mutex> lock{world().mutex, std::try_to_lock};
  Locked() {
    if (lock) return;
    WithoutGil waiting;
    lock.lock();
  }
};

Stream& stream_of(const c10::Stream& stream) {
  return *world().streams.at(stream.device_index() * kStreams + stream.id());
}

Stream& current_stream(int device) { return *world().streams.at(device * kStreams + current_streams[device]); }

c10::Device device_of(int index) { return {kType, c10::DeviceIndex(index)}; }

c10::Stream named(int device, int id) { return c10::Stream(c10::Stream::UNSAFE, device_of(device), id); }

// Launching, under the lock

uint64_t launch(Stream& stream, Job job, const std::vector<Access>& accesses = {}) {
  auto& order = world().order;
  merge(stream.clock, order.host);
  stream.clock[stream.number] = ++stream.launched;
  for (auto& access : accesses) order.touch(job.name, stream, access);
  stream.push(std::move(job));
  return stream.launched;
}

void launch_wait(Stream& stream, Stream& other, uint64_t tick, const Clock& clock) {
  if (&stream == &other) return;
  launch(stream, {"wait", [&other, tick] { other.wait_for(tick); }, false});
  merge(stream.clock, clock);
}

void raise_error_of(Stream& stream) {
  const auto error = stream.take_error();
  TORCH_CHECK(error.empty(), "on stream ", stream.number, " of the stand-in: ", error);
}

// Waits without the lock.
void synchronize(Stream& stream) {
  uint64_t tick;
  Clock clock;
  {
    Locked lock;
    tick = stream.launched;
    clock = stream.clock;
  }
  {
    WithoutGil waiting;
    stream.wait_for(tick);
  }
  Locked lock;
  merge(world().order.host, clock);
  raise_error_of(stream);
}

void synchronize_device(int device) {
  for (int id = 0; id < kStreams; id++) synchronize(*world().streams[device * kStreams + id]);
}

void Stream::work() {
  c10::impl::ExcludeDispatchKeyGuard no_autograd(
      c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
  omp_set_num_threads(1);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !queue_.empty() && !held_; });
    Job job = std::move(queue_.front());
    queue_.pop_front();
    const int64_t late = job.may_be_late && most_microseconds_ ? late_() % most_microseconds_ : 0;
    lock.unlock();
    std::string error;
    try {
      if (late) std::this_thread::sleep_for(std::chrono::microseconds(late));
      job.run();
    } catch (const std::exception& caught) {
      error = job.name + ": " + caught.what();
    }
    job.run = nullptr;  // what it holds may free memory, which takes other locks
    lock.lock();
    if (error_.empty()) error_ = error;
    done_++;
    changed_.notify_all();
  }
}

// Memory

void spoil(char* twin, size_t nbytes) { memset(twin, 0xFF, std::min(nbytes, kMiB)); }

World::World() {
  for (int index = 0; index < kDevices; index++) {
    Device& device = devices[index];
    device.file = memfd_create("standin", 0);
    TORCH_CHECK(device.file >= 0 && ftruncate(device.file, kAddresses) == 0, "no memory for the stand-in");
    auto map = [&](int allowed) {
      void* at = mmap(nullptr, kAddresses, allowed, MAP_SHARED | MAP_NORESERVE, device.file, 0);
      TORCH_CHECK(at != MAP_FAILED, "no addresses for the stand-in");
      madvise(at, kAddresses, MADV_DONTDUMP);
      return static_cast<char*>(at);
    };
    device.memory = map(PROT_NONE);
    device.to_twin = map(PROT_READ | PROT_WRITE) - device.memory;
    for (int id = 0; id < kStreams; id++)
      streams[index * kStreams + id] = std::make_unique<Stream>(index * kStreams + id);
    Driver driver;
    driver.launched = [this](int stream) { return streams[stream]->launched; };
    driver.passed = [this](int stream, uint64_t tick) {
      const bool is_done = streams[stream]->has_done(tick);
      if (is_done) order.host[stream] = std::max(order.host[stream], tick);
      return is_done;
    };
    driver.synchronize = [this, index] {
      for (int id = 0; id < kStreams; id++) {
        Stream& stream = *streams[index * kStreams + id];
        WithoutGil waiting;
        stream.wait_for(stream.launched);
        merge(order.host, stream.clock);
      }
    };
    driver.released = [&device](size_t from, size_t size) {
      fallocate(device.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from, size);
    };
    driver.freed = [this, &device](const Block& block) {
      char* twin = device.memory + block.address + device.to_twin;
      launch(*streams[block.stream], {"freeing", [twin, n = block.requested] { spoil(twin, n); }, false});
    };
    device.allocator = std::make_unique<CachingAllocator>(driver, kCapacity);
  }
}

void* allocate_on(int index, size_t nbytes) {
  if (!nbytes) return nullptr;
  Locked lock;
  auto& device = world().devices[index];
  auto& counts = device.allocator->counts;
  Stream& stream = current_stream(index);
  try {
    const Block& block = device.allocator->malloc(nbytes, stream.number);
    char* at = device.memory + block.address;
    world().order.spans[uintptr_t(at)] = Span{nbytes, stream.number};
    launch(stream, {"allocating", [twin = at + device.to_twin, nbytes] { spoil(twin, nbytes); }, false});
    return at;
  } catch (const Full&) {
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "the stand-in is out of memory. Tried to allocate ", nbytes, " bytes. Device ", index,
        " has ", device.allocator->capacity, " bytes, of which ", counts.reserved.current, " are reserved and ",
        counts.allocated.current, " allocated.");
  }
}

int device_at(const void* at) {
  for (int index = 0; index < kDevices; index++) {
    const char* memory = world().devices[index].memory;
    if (memory <= at && at < memory + kAddresses) return index;
  }
  return -1;
}

void free_of_device(void* at) {
  Locked lock;
  auto& device = world().devices[device_at(at)];
  const size_t address = static_cast<char*>(at) - device.memory;
  const Block& block = device.allocator->at(address);
  auto& order = world().order;
  auto clock = world().streams[block.stream]->clock;
  merge(clock, order.host);
  order.end(uintptr_t(at), clock, {block.uses.begin(), block.uses.end()});
  device.allocator->free(address);
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* at = allocate_on(current_device, nbytes);
    return {at, at, &free_of_device, device_of(current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_of_device; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "copy tensors, not addresses"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Locked lock;
    for (auto& device : world().devices) device.allocator->empty_cache();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (!data.get()) return;
    Locked lock;
    auto& device = world().devices[device_at(data.get())];
    Block& block = device.allocator->at(static_cast<char*>(data.get()) - device.memory);
    if (const int number = stream_of(stream).number; number != block.stream) block.uses.insert(number);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    Locked lock;
    const Counts& counts = world().devices[index].allocator->counts;
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto tell = [](auto& into, const Count& count) { into[0].current = count.current, into[0].peak = count.peak; };
    tell(stats.requested_bytes, counts.requested);
    tell(stats.allocated_bytes, counts.allocated);
    tell(stats.active_bytes, counts.active);
    tell(stats.reserved_bytes, counts.reserved);
    stats.num_alloc_retries = counts.retries;
    stats.num_ooms = counts.ooms;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    Locked lock;
    world().devices[index].allocator->counts.reset_peaks();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    Locked lock;
    auto& allocator = *world().devices[index].allocator;
    return {allocator.capacity - allocator.counts.reserved.current, allocator.capacity};
  }
};

Memory memory;
REGISTER_ALLOCATOR(kType, &memory);

// Pinned memory is unmapped when it is free and all copies from and to it are done.
struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (!nbytes) return {nullptr, c10::kCPU};
    Locked lock;
    auto& order = world().order;
    std::erase_if(world().pinned_once, [](auto& once) {
      auto& [at, size, touches] = once;
      auto is_done = [](auto& touch) { return world().streams[touch.stream]->has_done(touch.tick); };
      return std::all_of(touches.begin(), touches.end(), is_done) && munmap(at, size) == 0;
    });
    void* at = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "no pinned memory");
    order.spans[uintptr_t(at)] = Span{nbytes, -1};
    return {at, at, &give_back, c10::kCPU};
  }
  static void give_back(void* at) {
    Locked lock;
    auto found = world().order.spans.find(uintptr_t(at));
    world().pinned_once.emplace_back(static_cast<char*>(at), found->second.size, std::move(found->second.touches));
    world().order.spans.erase(found);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t count) const override { memcpy(to, from, count); }
  static bool holds(const void* at) {
    Locked lock;
    const Span* span = world().order.span_of(uintptr_t(at));
    return span && span->stream < 0;
  }
};

Pinned pinned;

// Generators

uint64_t mixed(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

struct Draws final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, drawn_ = 0;

  explicit Draws(c10::Device device) : GeneratorImpl(device, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  static c10::DeviceType device_type() { return kType; }
  at::Generator next() { return at::detail::createCPUGenerator(mixed(mixed(seed_ + 1) + ++drawn_)); }
  void set_current_seed(uint64_t seed) override { seed_ = seed, drawn_ = 0; }
  void set_offset(uint64_t offset) override { drawn_ = offset; }
  uint64_t get_offset() const override { return drawn_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.device().is_cpu() && state.dtype() == at::kByte, "not a state");
    uint64_t both[2];
    memcpy(both, state.data(), 16);
    seed_ = both[0], drawn_ = both[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::TensorBase state = at::detail::empty_cpu({16}, at::kByte, false, std::nullopt);
    const uint64_t both[2] = {seed_, drawn_};
    memcpy(state.mutable_data_ptr(), both, 16);
    return state.getIntrusivePtr();
  }
  Draws* clone_impl() const override {
    auto* copy = new Draws(device());
    copy->seed_ = seed_, copy->drawn_ = drawn_;
    return copy;
  }
};

at::Generator& default_generator(int index) {
  static auto* all = new std::array<at::Generator, kDevices>{
      at::make_generator<Draws>(device_of(0)), at::make_generator<Draws>(device_of(1))};
  return all->at(index < 0 ? current_device : index);
}

Draws& draws_of(const at::Generator& generator) { return *at::check_generator<Draws>(generator); }

// The interfaces of PyTorch

struct Ticket {
  Stream* stream;
  uint64_t tick;
  Clock clock;
  std::shared_ptr<std::chrono::steady_clock::time_point> time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  static constexpr auto static_type = kType;
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_of(current_device); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "no device ", device);
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  static int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }

  c10::Stream getStream(c10::Device device) const override {
    return named(index_of(device), current_streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return named(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Locked lock;
    int& handed_out = world().devices[index_of(device)].handed_out;
    return named(index_of(device), 1 + handed_out++ % (kStreams - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = int(stream.id());
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Locked lock;
    return stream_of(stream).has_done(stream_of(stream).launched);
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream_of(stream)); }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    synchronize_device(index < 0 ? current_device : index);
  }

  static Ticket* ticket(void* event) { return static_cast<Ticket*>(event); }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    Locked lock;
    Stream& stream = stream_of(on);
    auto time = std::make_shared<std::chrono::steady_clock::time_point>();
    launch(stream, {"event", [time] { *time = std::chrono::steady_clock::now(); }, false});
    delete ticket(*event);
    *event = new Ticket{&stream, stream.launched, stream.clock, time};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Locked lock;
    launch_wait(stream_of(stream), *ticket(event)->stream, ticket(event)->tick, ticket(event)->clock);
  }
  bool queryEvent(void* event) const override {
    return !event || ticket(event)->stream->has_done(ticket(event)->tick);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    {
      WithoutGil waiting;
      ticket(event)->stream->wait_for(ticket(event)->tick);
    }
    Locked lock;
    merge(world().order.host, ticket(event)->clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete ticket(event); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    synchronizeEvent(from), synchronizeEvent(to);
    return std::chrono::duration<double, std::milli>(*ticket(to)->time - *ticket(from)->time).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    memory.recordStream(data, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void resize_storage(c10::StorageImpl& storage, size_t nbytes);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice(device_of(device)); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(device_of(device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* at) const override { return Pinned::holds(at); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  c10::Device getDeviceFromPtr(void* at) const override {
    TORCH_CHECK(device_at(at) >= 0, "not an address of the stand-in");
    return device_of(device_at(at));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Draws>(device_of(index < 0 ? current_device : index));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), nbytes);
  }
};

const bool is_hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// Tensors

bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

Tensor tensor_on(c10::Storage storage, const Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}

// The same tensor for a job, `shift` bytes further on; it keeps nothing alive, as a kernel on a device does not.
Tensor borrowed(const Tensor& tensor, std::ptrdiff_t shift) {
  const auto& storage = tensor.storage();
  char* at = static_cast<char*>(storage.mutable_data());
  if (at) at += shift;
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(at, c10::kCPU), nullptr, false);
  return tensor_on(std::move(same), tensor, c10::DispatchKey::CPU);
}

Tensor twin_of(const Tensor& tensor) {
  return borrowed(tensor, world().devices[tensor.device().index()].to_twin);
}

Access access_of(const Tensor& tensor, bool is_write) {
  if (!tensor.numel()) return {0, 0, false};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto from = uintptr_t(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
  return {from, from + (last + 1) * tensor.itemsize(), is_write};
}

// Refuse memory that is not there: freed, or a storage that was emptied.
void check_access(const std::string& name, const Access& access) {
  if (access.from == access.to) return;
  const Span* span = world().order.span_of(access.from);
  TORCH_CHECK(span, name, " uses memory of the stand-in after it was freed");
}

Tensor empty_like_meta(const Tensor& meta, c10::Device device) {
  const c10::DeviceGuard guard(device);
  return Tensor(at::detail::empty_strided_generic(
      meta.sizes(), meta.strides(), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), meta.scalar_type()));
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return Tensor(at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return Tensor(at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype)));
}

// Launch a kernel, or a copy, on the current stream of `device`.
void enqueue(
    const std::string& name, int device, std::vector<Access> accesses, std::function<void()> run, bool waits) {
  Stream& stream = current_stream(device);
  {
    Locked lock;
    for (auto& access : accesses) check_access(name, access);
    raise_error_of(stream);
    launch(stream, {name, std::move(run), true}, accesses);
  }
  if (waits) synchronize(stream);
}

// A copy from or to pinned memory is asynchronous if it may be; other memory of the host is read at once, and a copy
// to it is waited for.
Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (!target.numel()) return target;
  const bool leaves = is_here(source), arrives = is_here(target);
  const int device = (leaves ? source : target).device().index();
  std::vector<Access> accesses;
  auto in_job = [&](const Tensor& tensor, bool is_write) {
    if (!is_here(tensor) && !tensor.is_pinned()) return is_write ? tensor : tensor.clone();
    accesses.push_back(access_of(tensor, is_write));
    return is_here(tensor) ? twin_of(tensor) : borrowed(tensor, 0);
  };
  const Tensor from = in_job(source, false), to = in_job(target, true);
  const bool waits = leaves && arrives ? false : arrives ? !non_blocking && source.is_pinned()
                                                         : !(non_blocking && target.is_pinned());
  Stream &here = current_stream(device), &there = current_stream((arrives ? target : source).device().index());
  if (leaves && arrives) {
    Locked lock;
    launch_wait(here, there, there.launched, there.clock);
  }
  enqueue("copy", device, accesses, [from, to] { Tensor(to).copy_(from); }, waits);
  if (leaves && arrives) {
    Locked lock;
    launch_wait(there, here, here.launched, here.clock);
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

void resize_storage(c10::StorageImpl& storage, size_t nbytes) {
  if (nbytes == storage.nbytes()) return;
  const c10::DeviceGuard guard(storage.device());
  const int device = storage.device().index();
  c10::DataPtr fresh = memory.allocate(nbytes);
  if (const size_t kept = std::min(nbytes, storage.nbytes())) {
    const auto from = uintptr_t(storage.data()), to = uintptr_t(fresh.get());
    const auto shift = world().devices[device].to_twin;
    auto move = [=] { memcpy((char*)to + shift, (char*)from + shift, kept); };
    enqueue("resize", device, {{from, from + kept, false}, {to, to + kept, true}}, move, false);
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(nbytes);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (needed > self.storage().nbytes()) resize_storage(*self.storage().unsafeGetStorageImpl(), needed);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  const auto length = int64_t(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {length}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()), &memory, true);
  return set_storage(self, std::move(none), 0, {0}, {});
}

at::Scalar local_scalar(const Tensor& self) {
  synchronize(current_stream(self.device().index()));
  {
    Locked lock;
    check_access("item", access_of(self, false));
    Stream& stream = current_stream(self.device().index());
    merge(stream.clock, world().order.host);
    world().order.touch("item", stream, access_of(self, false));
  }
  return twin_of(self).item();
}

void record_stream(Tensor& self, c10::Stream stream) { memory.recordStream(self.storage().data_ptr(), stream); }

// The mask is drawn with this device's generator, which the CPU's kernel of native_dropout would not use.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  Tensor output = at::mul(input, mask);
  output.mul_(p == 1 ? 0.0 : 1 / (1 - p));
  return {output, mask};
}

// Any other op

template <typename Change>
c10::IValue changed(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

template <typename Visit>
void each_tensor(const c10::IValue& value, const Visit& visit) {
  changed(value, [&](const Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
    return tensor;
  });
}

struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  std::vector<c10::IValue> args;
  std::string name;
  int device = -1;

  Call(const c10::OperatorHandle& op, Stack* stack)
      : op(op), schema(op.schema()), args(torch::jit::pop(*stack, schema.arguments().size())),
        name(schema.operator_name().name) {
    find_device();
  }

  bool is_written(size_t number) const {
    const auto* alias = schema.arguments()[number].alias_info();
    return alias && alias->isWrite();
  }

  void find_device() {
    const bool takes_indices = name.find("index") != std::string::npos;
    for (auto& arg : args) {
      each_tensor(arg, [&](const Tensor& tensor) {
        if (!is_here(tensor)) {
          TORCH_CHECK(
              tensor.dim() == 0 || takes_indices, "Expected all tensors to be on the same device: ", name,
              " on the stand-in got a tensor on ", tensor.device());
          return;
        }
        TORCH_CHECK(
            device < 0 || device == tensor.device().index(), "Expected all tensors to be on the same device: ", name,
            " got tensors of two devices");
        device = tensor.device().index();
      });
      if (arg.isDevice() && device < 0) device = Guard::index_of(arg.toDevice());
    }
    if (device < 0) device = current_device;
  }

  // Arguments for another device: tensors by `change`, devices by `there`, and the generator by `draws`.
  template <typename Change>
  Stack args_for(c10::Device there, const std::optional<at::Generator>& draws, const Change& change) const {
    Stack stack;
    for (size_t number = 0; number < args.size(); number++) {
      const auto& arg = args[number];
      const auto& kind = *schema.arguments()[number].real_type();
      const bool is_generator = kind.str().find("Generator") != std::string::npos;
      if (is_generator) stack.push_back(draws ? c10::IValue(*draws) : c10::IValue());
      else if (arg.isDevice()) stack.push_back(there);
      else stack.push_back(changed(arg, change));
    }
    return stack;
  }

  Stack args_for_meta() const {
    return args_for(c10::kMeta, std::nullopt, [](const Tensor& tensor) {
      if (!tensor.defined() || (!is_here(tensor) && tensor.dim() == 0)) return tensor;
      Tensor meta(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
      return meta;
    });
  }

  Stack args_for_cpu() const {
    return args_for(c10::kCPU, next_draws(), [](const Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      if (is_here(tensor)) return twin_of(tensor);
      Tensor copy = tensor.clone();  // the host may change it before the kernel runs
      copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
      return copy;
    });
  }

  std::optional<at::Generator> next_draws() const {
    bool takes_generator = false;
    for (size_t number = 0; number < args.size(); number++) {
      const auto& kind = *schema.arguments()[number].real_type();
      if (kind.str().find("Generator") == std::string::npos) continue;
      takes_generator = true;
      if (args[number].isGenerator()) return draws_of(args[number].toGenerator()).next();
    }
    if (takes_generator) return draws_of(default_generator(device)).next();
    TORCH_CHECK_NOT_IMPLEMENTED(
        !op.hasTag(at::Tag::nondeterministic_seeded), name, " draws numbers and takes no generator");
    return std::nullopt;
  }

  std::vector<Access> accesses() const {
    std::vector<Access> found;
    for (size_t number = 0; number < args.size(); number++)
      each_tensor(args[number], [&](const Tensor& tensor) {
        if (!is_here(tensor)) return;
        found.push_back(access_of(tensor, is_written(number)));
      });
    return found;
  }

  // The argument that a return value is, if it is one.
  const c10::IValue* returned(size_t number) const {
    const auto* alias = schema.returns()[number].alias_info();
    if (!alias) return nullptr;
    for (size_t arg = 0; arg < args.size(); arg++)
      if (const auto* other = schema.arguments()[arg].alias_info(); other && other->beforeSets() == alias->beforeSets())
        return &args[arg];
    return nullptr;
  }

  bool is_view() const {
    return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& value) {
      return value.alias_info() && !value.alias_info()->isWrite();
    });
  }

  bool needs_values() const {
    auto is_tensor = [](const c10::Argument& value) {
      return value.type()->isSubtypeOf(*c10::TensorType::get()) || value.type()->isSubtypeOf(*c10::ListType::ofTensors());
    };
    return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output) ||
        !op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta) || selects_by_mask() ||
        !std::all_of(schema.returns().begin(), schema.returns().end(), is_tensor);
  }

  // An op in place without other tensors: its shape cannot change, and some Meta kernels of these load much of Python.
  bool changes_one() const {
    size_t tensors = 0;
    for (auto& arg : args) each_tensor(arg, [&](const Tensor&) { tensors++; });
    return tensors == 1 && args[0].isTensor() && is_written(0) && schema.returns().size() == 1 &&
        returned(0) == &args[0] && !schema.arguments()[0].is_out();
  }

  bool selects_by_mask() const {
    bool found = false;
    if (name == "aten::index")
      each_tensor(args[1], [&](const Tensor& by) {
        found |= by.scalar_type() == at::kBool || by.scalar_type() == at::kByte;
      });
    return found;
  }

  static void run_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  }

  // A view has the storage of its input; the CPU's kernel computes its shape and reads no data.
  Stack view() const {
    Stack stack = args_for_cpu();
    {
      c10::impl::ExcludeDispatchKeyGuard no_autograd(
          c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
      run_on_cpu(op, stack);
    }
    const auto& storage = args[0].toTensor().storage();
    for (auto& value : stack)
      value = changed(value, [&](const Tensor& tensor) {
        return tensor_on(storage, tensor, c10::DispatchKey::PrivateUse1);
      });
    return stack;
  }

  // Wait for the kernel, then copy what it made.
  Stack wait() const {
    auto stack = std::make_shared<Stack>(args_for_cpu());
    enqueue(name, device, accesses(), [op = op, stack] { run_on_cpu(op, *stack); }, true);
    Stack results;
    for (size_t number = 0; number < stack->size(); number++) {
      if (const auto* arg = returned(number)) {
        results.push_back(*arg);
        continue;
      }
      results.push_back(changed((*stack)[number], [&](const Tensor& made) {
        if (!made.defined()) return made;
        Tensor here = empty_like_meta(made, device_of(device));
        copy_from(made, here, false);
        return here;
      }));
    }
    return results;
  }

  // Shapes from the Meta kernel, outputs allocated, and the kernel left to the stream.
  Stack go_on() const {
    Stack metas = args_for_meta();
    const Stack given = metas;
    if (changes_one()) metas = {given[0]};
    else op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &metas);
    for (size_t number = 0; number < args.size(); number++)
      if (is_written(number) && args[number].isTensor() && is_here(args[number].toTensor()))
        if (const auto& meta = given[number].toTensor(); meta.sizes() != args[number].toTensor().sizes()) {
          resize_(args[number].toTensor(), meta.sizes(), std::nullopt);
          args[number].toTensor().unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
        }
    Stack results;
    std::vector<Access> touched = accesses();
    std::vector<std::optional<c10::IValue>> targets;  // twins of new outputs
    for (size_t number = 0; number < metas.size(); number++) {
      if (const auto* arg = returned(number)) {
        results.push_back(*arg);
        targets.emplace_back();
        continue;
      }
      results.push_back(changed(metas[number], [&](const Tensor& meta) {
        return meta.defined() ? empty_like_meta(meta, device_of(device)) : meta;
      }));
      each_tensor(results.back(), [&](const Tensor& made) { touched.push_back(access_of(made, true)); });
      targets.push_back(changed(results.back(), [](const Tensor& made) {
        return made.defined() ? twin_of(made) : made;
      }));
    }
    auto run = [op = op, stack = args_for_cpu(), targets]() mutable {
      run_on_cpu(op, stack);
      for (size_t number = 0; number < stack.size(); number++)
        if (targets[number]) fill(*targets[number], stack[number]);
    };
    enqueue(name, device, touched, run, false);
    return results;
  }

  static void fill(const c10::IValue& target, const c10::IValue& made) {
    std::vector<Tensor> from;
    each_tensor(made, [&](const Tensor& tensor) { from.push_back(tensor); });
    size_t next = 0;
    each_tensor(target, [&](const Tensor& tensor) {
      TORCH_CHECK(next < from.size() && from[next].sizes() == tensor.sizes(), "its Meta kernel told another shape");
      Tensor(tensor).copy_(from[next++]);
    });
  }
};

void any_op(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, stack);
  const c10::DeviceGuard guard(device_of(call.device));
  Stack results = call.is_view() ? call.view() : call.needs_values() ? call.wait() : call.go_on();
  for (auto& result : results) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_op>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("record_stream", &record_stream);
  m.impl("native_dropout", &native_dropout);
  // These would look for a kernel of this device by name.
  for (const char* name : {"convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&any_op>());
}

// What Python asks of the device, as torch.ops.standin

int64_t device_count() { return kDevices; }

void set_capacity(int64_t device, int64_t nbytes) {
  Locked lock;
  world().devices.at(device).allocator->capacity = nbytes ? nbytes : kCapacity;
}

void set_delay(int64_t most_microseconds, int64_t seed) {
  for (auto& stream : world().streams) stream->delay(most_microseconds, seed);
}

void hold(int64_t device, int64_t id, bool held) { world().streams.at(device * kStreams + id)->hold(held); }

std::vector<std::string> take_faults() {
  Locked lock;
  return std::exchange(world().order.faults, {});
}

std::vector<int64_t> layout(int64_t device) {
  Locked lock;
  return world().devices.at(device).allocator->layout();
}

Tensor get_rng_state(int64_t device) { return Tensor::wrap_tensor_impl(draws_of(default_generator(device)).get_state()); }

void set_rng_state(int64_t device, const Tensor& state) {
  draws_of(default_generator(device)).set_state(*state.unsafeGetTensorImpl());
}

void manual_seed(int64_t device, int64_t seed) { draws_of(default_generator(device)).set_current_seed(seed); }

int64_t initial_seed(int64_t device) { return draws_of(default_generator(device)).current_seed(); }

TORCH_LIBRARY(standin, m) {
  m.def("device_count", &device_count);
  m.def("set_capacity", &set_capacity);
  m.def("set_delay", &set_delay);
  m.def("hold", &hold);
  m.def("take_faults", &take_faults);
  m.def("layout", &layout);
  m.def("get_rng_state", &get_rng_state);
  m.def("set_rng_state", &set_rng_state);
  m.def("manual_seed", &manual_seed);
  m.def("initial_seed", &initial_seed);
}

}  // namespace standin
