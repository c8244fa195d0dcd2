// Work that threads share, and the kinds of it that a forward is made of.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace OPERATORS {

inline std::atomic<uint64_t> serials = 1;
inline int64_t own_count = 0, *heartbeat = &own_count;  // grows with each work

// Parts 0 to parts - 1, which any threads run in any order.
struct Work {
  const int64_t parts;
  const uint64_t serial = serials++;  // tells it from works before at the same address

  explicit Work(int64_t parts) : parts(parts) {}
  virtual ~Work() = default;
  virtual void run(int64_t part) const = 0;
};

// Work that is a function of the part.
struct Function final : Work {
  const std::function<void(int64_t)> one;
  Function(int64_t parts, std::function<void(int64_t)> one) : Work(parts), one(std::move(one)) {}
  void run(int64_t part) const override { one(part); }
};

using Works = std::vector<std::unique_ptr<Work>>;

// Threads that run works, one after another. A work ends when its parts are done, whoever did them: a thread whose core
// was taken away delays the others by no more than the part that it has begun. Who finds no part waits in a loop for a
// moment, and then sleeps, so that its core is free for the thread that has one.
class Team {
 public:
  // Run the works on this thread and on others.
  void run(const Works& works, int64_t threads) {
    if (threads <= 1) {
      for (const auto& work : works) {
        ++*heartbeat;
        for (int64_t part = 0; part < work->parts; part++) work->run(part);
      }
      return;
    }
    std::lock_guard turn(turn_);
    for (; started_ < threads - 1; started_++) std::thread([this] { help(); }).detach();
    next_ = works.data();
    end_ = next_ + works.size();
    ended_ = false;
    open();
    while (!ended_) wait(take_parts(), [this] { return ended_.load(); });
  }

 private:
  // The number of a work that is open, its parts, and the next of them.
  struct Ticket {
    uint64_t number : 24, parts : 20, next : 20;
  };

  static constexpr auto PATIENCE = std::chrono::microseconds(40);  // about what it takes to wake a thread

  // Open the next work that has parts, or end.
  void open() {
    ++*heartbeat;
    while (next_ < end_ && (*next_)->parts == 0) next_++;
    const bool is_end = next_ == end_;
    Ticket ticket = ticket_.load();
    ticket.number++;
    ticket.parts = is_end ? 0 : (*next_)->parts;
    ticket.next = 0;
    if (!is_end) work_ = (next_++)->get();
    done_ = 0;
    ticket_ = ticket;
    if (is_end) ended_ = true;  // from here on another call may open its works
    if (sleeping_ == 0) return;
    { std::lock_guard lock(mutex_); }  // a thread has begun to sleep or will see the ticket
    wake_.notify_all();
  }

  // Run parts until none is left. Return the ticket that has none.
  Ticket take_parts() {
    Ticket ticket = ticket_.load();
    while (ticket.next < ticket.parts) {
      Ticket taken = ticket;
      taken.next++;
      if (!ticket_.compare_exchange_weak(ticket, taken)) continue;
      work_.load()->run(ticket.next);  // it stays open until this part is done
      if (++done_ == int64_t(ticket.parts)) open();
      ticket = ticket_.load();
    }
    return ticket;
  }

  // Wait until another work is open or `is_over`.
  template <class Over>
  void wait(Ticket seen, const Over& is_over) {
    auto is_done = [&] { return ticket_.load().number != seen.number || is_over(); };
    for (const auto start = std::chrono::steady_clock::now(); std::chrono::steady_clock::now() - start < PATIENCE;)
      for (int i = 0; i < 16; i++) {
        if (is_done()) return;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      }
    std::unique_lock lock(mutex_);
    sleeping_++;
    wake_.wait(lock, is_done);
    sleeping_--;
  }

  void help() {
    while (true) wait(take_parts(), [] { return false; });
  }

  std::mutex turn_, mutex_;
  std::condition_variable wake_;
  std::atomic<Ticket> ticket_ = Ticket{};
  std::atomic<const Work*> work_ = nullptr;
  std::atomic<int64_t> done_ = 0, sleeping_ = 0;
  std::atomic<bool> ended_ = true;
  const std::unique_ptr<Work>*next_ = nullptr, *end_ = nullptr;
  int64_t started_ = 0;
};

inline Team& team() {
  static Team* kept = new Team;  // its threads live as long as the process
  return *kept;
}

// Return the threads for so many multiplications. Few of them cost less than waking a thread.
int64_t threads_for(int64_t multiplications);

// Rows as a product reads them, each `stride` numbers after the one before. They are normed if there is a norm, and with
// `finite` numbers that are not are zeros. `gated` rows are gate and up, of which silu(gate) * up is read.
struct Rows {
  const void* x;
  int64_t count, size, stride;
  const float* norm = nullptr;
  float eps = 0;
  bool finite = false, gated = false;
};

// rows @ weight.T + bias + plus to y [rows, out], and to `also`, whose rows are `also_stride` numbers apart.
struct Product {
  Rows rows;
  int64_t out;
  const void *weight, *bias = nullptr;
  void* y = nullptr;
  const float* scales = nullptr;  // [out], of a weight in int8
  const void* plus = nullptr;
  void* also = nullptr;
  int64_t also_stride = 0;
};

// Attention of rows q over paged K and V, to y [rows, heads, dim].
struct AttentionRows {
  const void *q, *k, *v;
  void* y;
  const float* sinks;
  const int32_t *starts, *lengths, *table;
  int64_t q_row, q_head, num_seqs, columns, heads, kv_heads, dim, page_size, window;
  bool causal;
};

// Rows [q heads, k heads, v heads] of numbers, whose K and V go to slots. Rows follow one another layer by layer, and
// `turns` has (cos, sin) of each pair of a head, the same for all layers of a row. Norms may be null.
struct RotatedRows {
  const void* x;
  const float *q_norm, *k_norm, *turns;
  void *q, *k, *v;
  const int32_t* slots;
  int64_t rows, row_size, heads, kv_heads, dim, layers;
  float eps;
};

void add_product(Works&, const Product&, int64_t threads);
void add_rows(Works&, const Rows&, void* y);
void add_attention(Works&, const AttentionRows&, int64_t threads);
void add_rotation(Works&, const RotatedRows&, int64_t threads);

}  // namespace OPERATORS
