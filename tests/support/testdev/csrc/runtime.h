// A device made of threads: its memory, its streams, its events. Nothing here knows of torch.
//
// Work is enqueued on a stream and runs when the stream's thread reaches it. Device memory is
// mapped twice: `device` addresses, which tensors hold, cannot be touched (a read from the host is
// a segmentation fault, as it is with a GPU), and `shadow` addresses, which enqueued work uses.

#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace testdev {

using Task = std::function<void()>;
using StreamId = int64_t;

// ------------------------------------------------------------------ events and streams

class Stream;

class Event {
 public:
  void record(Stream& stream);
  void block(Stream& stream);
  void wait();  // on the host
  bool done();
  double time_ms();  // of the last record that is done

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t issued = 0;
    uint64_t done = 0;
    double time_ms = 0;
  };
  static void wait_for(State& state, uint64_t version);
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

class Stream {
 public:
  explicit Stream(StreamId id) : id(id) {}
  const StreamId id;
  void push(Task task);
  void wait();  // on the host, for all that was pushed before
  bool idle();

 private:
  void run();
  void delay();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t pushed_ = 0;
  uint64_t done_ = 0;
  bool started_ = false;
  uint64_t delay_epoch_ = 0;
  std::mt19937_64 random_;
};

Stream& stream(StreamId id);     // 0 is the default stream
Stream& stream_from_pool();      // one of 32, in turn, as CUDA's
Stream& new_stream();            // never in the pool: for the library's own threads
StreamId current_stream();       // of this thread
StreamId exchange_current_stream(StreamId id);
std::function<void()> hold(Stream& stream);  // nothing after it runs until that is called
void synchronize();              // the host waits for all streams; rethrows errors
void rethrow_error();            // what failed on a stream, once

// Before each task a stream sleeps with `probability` for up to `max_us` microseconds, at random
// from `seed`: work that is not ordered by an event is then seen to be not ordered.
void set_delays(uint64_t seed, double probability, int max_us);

// How often the host has waited for the device.
uint64_t host_waits();
void count_host_wait();

// ------------------------------------------------------------------------------ memory

struct MemoryStats {
  size_t allocated = 0, peak_allocated = 0;  // bytes in use
  size_t reserved = 0, peak_reserved = 0;    // bytes taken from the device
  size_t allocations = 0, segments = 0;
};

struct Block;

// torch's rules: a block belongs to the stream that was current when it was allocated; when it is
// freed, the next allocation on that stream may get it at once, also while other streams still use
// it, unless they were recorded. Fresh and freed blocks are filled with 0xff (NaNs) in the order of
// their stream.
Block* allocate(size_t bytes, StreamId stream);  // nullptr: out of memory
void* address(const Block* block);
void release(Block* block);
void record_use(Block* block, StreamId stream);
void empty_cache();
MemoryStats memory_stats();
void reset_peaks();
void set_memory_limit(size_t bytes);

void* shadow(const void* device);  // the same byte, where it may be touched
bool is_device_address(const void* pointer);

void* allocate_pinned(size_t bytes);
void release_pinned(void* pointer);
bool is_pinned(const void* pointer);
size_t pinned_bytes();  // every block rounded up to a power of two, as torch's allocator does

}  // namespace testdev
