#include "runtime.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <bit>
#include <cstring>
#include <exception>
#include <map>
#include <stdexcept>
#include <thread>
#include <unordered_map>

#include "gil.h"

namespace testdev {

// -------------------------------------------------------------------------------- errors

namespace {

std::mutex error_mutex;
std::exception_ptr first_error;

void keep_error(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(error_mutex);
  if (!first_error) first_error = error;
}

std::atomic<uint64_t> waits{0};

double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void rethrow_error() {
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(error_mutex);
    std::swap(error, first_error);
  }
  if (error) std::rethrow_exception(error);
}

uint64_t host_waits() { return waits; }
void count_host_wait() { ++waits; }

// -------------------------------------------------------------------------------- events

void Event::record(Stream& stream) {
  uint64_t version;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    version = ++state_->issued;
  }
  stream.push([state = state_, version] {
    std::lock_guard<std::mutex> lock(state->mutex);
    state->done = std::max(state->done, version);
    state->time_ms = now_ms();
    state->changed.notify_all();
  });
}

void Event::wait_for(State& state, uint64_t version) {
  std::unique_lock<std::mutex> lock(state.mutex);
  state.changed.wait(lock, [&] { return state.done >= version; });
}

void Event::block(Stream& stream) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  // As in CUDA, what counts is the last record before this call; without one nothing is waited for.
  const uint64_t version = state_->issued;
  if (version > state_->done) stream.push([state = state_, version] { wait_for(*state, version); });
}

void Event::wait() {
  count_host_wait();
  without_gil([&] {
    uint64_t version;
    {
      std::lock_guard<std::mutex> lock(state_->mutex);
      version = state_->issued;
    }
    wait_for(*state_, version);
  });
  rethrow_error();
}

bool Event::done() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->done >= state_->issued;
}

double Event::time_ms() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->time_ms;
}

// ------------------------------------------------------------------------------- streams

namespace {

struct Delays {
  std::mutex mutex;
  uint64_t epoch = 0;
  uint64_t seed = 0;
  double probability = 0;
  int max_us = 0;
};

Delays& delays() {
  static auto* all = new Delays();
  return *all;
}

// Leaked, as are the threads: at the end of the process nothing waits for them.
struct Streams {
  std::mutex mutex;
  std::vector<std::unique_ptr<Stream>> all;
  size_t next_in_pool = 0;
  Streams() { all.push_back(std::make_unique<Stream>(0)); }
};

Streams& streams() {
  static auto* all = new Streams();
  return *all;
}

constexpr size_t kPoolSize = 32;
std::vector<StreamId>& pool() {
  static auto* ids = new std::vector<StreamId>();
  return *ids;
}

thread_local StreamId current = 0;

Stream& add_stream(Streams& there) {
  there.all.push_back(std::make_unique<Stream>(static_cast<StreamId>(there.all.size())));
  return *there.all.back();
}

}  // namespace

Stream& stream(StreamId id) {
  auto& there = streams();
  std::lock_guard<std::mutex> lock(there.mutex);
  return *there.all.at(id);
}

Stream& stream_from_pool() {
  auto& there = streams();
  std::lock_guard<std::mutex> lock(there.mutex);
  const size_t place = there.next_in_pool++ % kPoolSize;
  if (pool().size() <= place) pool().push_back(add_stream(there).id);
  return *there.all.at(pool()[place]);
}

Stream& new_stream() {
  auto& there = streams();
  std::lock_guard<std::mutex> lock(there.mutex);
  return add_stream(there);
}

StreamId current_stream() { return current; }

StreamId exchange_current_stream(StreamId id) {
  const StreamId before = current;
  current = id;
  return before;
}

std::function<void()> hold(Stream& stream) {
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false;
  };
  auto gate = std::make_shared<Gate>();
  stream.push([gate] {
    std::unique_lock<std::mutex> lock(gate->mutex);
    gate->changed.wait(lock, [&] { return gate->open; });
  });
  return [gate] {
    std::lock_guard<std::mutex> lock(gate->mutex);
    gate->open = true;
    gate->changed.notify_all();
  };
}

void synchronize() {
  std::vector<Stream*> all;
  {
    auto& there = streams();
    std::lock_guard<std::mutex> lock(there.mutex);
    for (auto& stream : there.all) all.push_back(stream.get());
  }
  count_host_wait();
  without_gil([&] {
    for (auto* stream : all) stream->wait();
  });
  rethrow_error();
}

void set_delays(uint64_t seed, double probability, int max_us) {
  auto& there = delays();
  std::lock_guard<std::mutex> lock(there.mutex);
  ++there.epoch;
  there.seed = seed;
  there.probability = probability;
  there.max_us = max_us;
}

void Stream::push(Task task) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!started_) {
    started_ = true;
    std::thread([this] { run(); }).detach();
  }
  tasks_.push_back(std::move(task));
  ++pushed_;
  changed_.notify_all();
}

void Stream::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t target = pushed_;
  changed_.wait(lock, [&] { return done_ >= target; });
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ == pushed_;
}

void Stream::delay() {
  int us = 0;
  {
    auto& there = delays();
    std::lock_guard<std::mutex> lock(there.mutex);
    if (delay_epoch_ != there.epoch) {
      delay_epoch_ = there.epoch;
      random_.seed(there.seed * 1000003 + static_cast<uint64_t>(id));
    }
    if (there.probability > 0 && there.max_us > 0) {
      std::uniform_real_distribution<double> unit(0, 1);
      if (unit(random_) < there.probability) us = static_cast<int>(unit(random_) * there.max_us);
    }
  }
  if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

void Stream::run() {
  while (true) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    delay();
    try {
      task();
    } catch (...) {
      keep_error(std::current_exception());
    }
    task = nullptr;  // what it holds is freed before the host hears that it is done
    std::lock_guard<std::mutex> lock(mutex_);
    ++done_;
    changed_.notify_all();
  }
}

// -------------------------------------------------------------------------------- memory

namespace {

constexpr size_t kArena = size_t{64} << 30;  // addresses, not memory: pages are made when touched
constexpr size_t kAlign = 512;
constexpr size_t kSegment = size_t{2} << 20;
constexpr int kPoison = 0xff;

struct Arena {
  char* device;
  char* shadow;
  Arena() {
    const int file = memfd_create("testdev", 0);
    if (file < 0 || ftruncate(file, kArena) != 0) throw std::runtime_error("testdev: no memory");
    void* untouchable = mmap(nullptr, kArena, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    void* usable =
        mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (untouchable == MAP_FAILED || usable == MAP_FAILED)
      throw std::runtime_error("testdev: no address space");
    close(file);
    device = static_cast<char*>(untouchable);
    shadow = static_cast<char*>(usable);
  }
};

Arena& arena() {
  static auto* only = new Arena();
  return *only;
}

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

struct Block {
  size_t offset, size;
  StreamId stream;
  bool free = false;
  Block* before = nullptr;  // neighbours within the segment
  Block* after = nullptr;
  std::set<StreamId> used_on;
};

namespace {

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->offset < b->offset;
  }
};

struct Pending {
  Block* block;
  std::vector<Event> events;
};

struct Memory {
  std::mutex mutex;
  std::map<StreamId, std::set<Block*, BySize>> free;
  std::vector<Pending> pending;
  std::multimap<size_t, size_t> returned;  // size and offset of segments given back
  size_t next_segment = 0;
  size_t limit = kArena;
  MemoryStats stats;
};

Memory& memory() {
  static auto* only = new Memory();
  return *only;
}

void poison(const Block& block) {
  void* start = arena().shadow + block.offset;
  stream(block.stream).push([start, size = block.size] { std::memset(start, kPoison, size); });
}

void merge_with_next(Memory& there, Block* block) {
  Block* next = block->after;
  if (!next || !next->free) return;
  there.free[next->stream].erase(next);
  block->size += next->size;
  block->after = next->after;
  if (next->after) next->after->before = block;
  delete next;
}

void give_back(Memory& there, Block* block) {
  poison(*block);
  block->free = true;
  block->used_on.clear();
  merge_with_next(there, block);
  if (Block* before = block->before; before && before->free) {
    there.free[before->stream].erase(before);
    merge_with_next(there, before);
    block = before;
  }
  there.free[block->stream].insert(block);
}

void collect(Memory& there) {
  auto done = [&](Pending& one) {
    for (auto& event : one.events)
      if (!event.done()) return false;
    give_back(there, one.block);
    return true;
  };
  auto& all = there.pending;
  all.erase(std::remove_if(all.begin(), all.end(), done), all.end());
}

Block* make_segment(Memory& there, size_t bytes, StreamId stream) {
  const size_t size = round_up(bytes, kSegment);
  if (there.stats.reserved + size > there.limit) return nullptr;
  size_t offset;
  if (auto old = there.returned.find(size); old != there.returned.end()) {
    offset = old->second;
    there.returned.erase(old);
  } else {
    offset = there.next_segment;
    if (offset + size > kArena) return nullptr;
    there.next_segment += size;
  }
  there.stats.reserved += size;
  there.stats.peak_reserved = std::max(there.stats.peak_reserved, there.stats.reserved);
  ++there.stats.segments;
  return new Block{offset, size, stream};
}

void return_segments(Memory& there) {
  collect(there);
  for (auto& [id, blocks] : there.free) {
    for (auto it = blocks.begin(); it != blocks.end();) {
      Block* block = *it;
      if (block->before || block->after) {
        ++it;
        continue;
      }
      it = blocks.erase(it);
      there.returned.emplace(block->size, block->offset);
      there.stats.reserved -= block->size;
      --there.stats.segments;
      delete block;
    }
  }
}

Block* find(Memory& there, size_t size, StreamId stream) {
  auto& blocks = there.free[stream];
  Block key{0, size, stream};
  auto it = blocks.lower_bound(&key);
  if (it == blocks.end()) return nullptr;
  Block* block = *it;
  blocks.erase(it);
  return block;
}

}  // namespace

Block* allocate(size_t bytes, StreamId stream) {
  auto& there = memory();
  std::lock_guard<std::mutex> lock(there.mutex);
  const size_t size = round_up(std::max<size_t>(bytes, 1), kAlign);
  collect(there);
  Block* block = find(there, size, stream);
  if (!block) block = make_segment(there, size, stream);
  if (!block) {
    return_segments(there);
    block = make_segment(there, size, stream);
  }
  if (!block) return nullptr;
  if (block->size > size) {
    auto* rest = new Block{block->offset + size, block->size - size, stream};
    rest->free = true;
    rest->before = block;
    rest->after = block->after;
    if (rest->after) rest->after->before = rest;
    block->after = rest;
    block->size = size;
    there.free[stream].insert(rest);
  }
  block->free = false;
  there.stats.allocated += size;
  there.stats.peak_allocated = std::max(there.stats.peak_allocated, there.stats.allocated);
  ++there.stats.allocations;
  poison(*block);
  return block;
}

void* address(const Block* block) { return arena().device + block->offset; }

void release(Block* block) {
  auto& there = memory();
  std::lock_guard<std::mutex> lock(there.mutex);
  there.stats.allocated -= block->size;
  block->used_on.erase(block->stream);
  if (block->used_on.empty()) {
    give_back(there, block);
    return;
  }
  Pending waiting{block, {}};
  for (const StreamId id : block->used_on) {
    waiting.events.emplace_back();
    waiting.events.back().record(stream(id));
  }
  there.pending.push_back(std::move(waiting));
}

void record_use(Block* block, StreamId id) {
  auto& there = memory();
  std::lock_guard<std::mutex> lock(there.mutex);
  block->used_on.insert(id);
}

void empty_cache() {
  synchronize();
  auto& there = memory();
  std::lock_guard<std::mutex> lock(there.mutex);
  return_segments(there);
}

MemoryStats memory_stats() {
  auto& there = memory();
  std::lock_guard<std::mutex> lock(there.mutex);
  return there.stats;
}

void reset_peaks() {
  auto& there = memory();
  std::lock_guard<std::mutex> lock(there.mutex);
  there.stats.peak_allocated = there.stats.allocated;
  there.stats.peak_reserved = there.stats.reserved;
}

void set_memory_limit(size_t bytes) {
  auto& there = memory();
  std::lock_guard<std::mutex> lock(there.mutex);
  there.limit = bytes ? bytes : kArena;
}

bool is_device_address(const void* pointer) {
  auto* byte = static_cast<const char*>(pointer);
  return byte >= arena().device && byte < arena().device + kArena;
}

void* shadow(const void* device) {
  if (!device) return nullptr;
  if (!is_device_address(device)) throw std::runtime_error("testdev: not memory of this device");
  return arena().shadow + (static_cast<const char*>(device) - arena().device);
}

// ----------------------------------------------------------------------- pinned host memory

namespace {

struct Pinned {
  std::mutex mutex;
  std::map<const char*, size_t> sizes;
};

Pinned& pinned() {
  static auto* only = new Pinned();
  return *only;
}

}  // namespace

void* allocate_pinned(size_t bytes) {
  void* start = std::aligned_alloc(64, round_up(std::max<size_t>(bytes, 1), 64));
  if (!start) throw std::bad_alloc();
  std::memset(start, kPoison, bytes);
  auto& there = pinned();
  std::lock_guard<std::mutex> lock(there.mutex);
  there.sizes[static_cast<const char*>(start)] = std::max<size_t>(bytes, 1);
  return start;
}

void release_pinned(void* pointer) {
  auto& there = pinned();
  {
    std::lock_guard<std::mutex> lock(there.mutex);
    auto it = there.sizes.find(static_cast<const char*>(pointer));
    std::memset(pointer, kPoison, it->second);
    there.sizes.erase(it);
  }
  std::free(pointer);
}

size_t pinned_bytes() {
  auto& there = pinned();
  std::lock_guard<std::mutex> lock(there.mutex);
  size_t total = 0;
  for (const auto& [start, bytes] : there.sizes) total += std::bit_ceil(bytes);
  return total;
}

bool is_pinned(const void* pointer) {
  auto& there = pinned();
  auto* byte = static_cast<const char*>(pointer);
  std::lock_guard<std::mutex> lock(there.mutex);
  auto it = there.sizes.upper_bound(byte);
  if (it == there.sizes.begin()) return false;
  --it;
  return byte < it->first + it->second;
}

}  // namespace testdev
