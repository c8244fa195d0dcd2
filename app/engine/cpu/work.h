// Work that threads share, and the kinds of it that a forward is made of.

#pragma once

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <ctime>
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

// A thread of a team, as the others see it.
struct Member {
  // Parts of its share of a work that nobody has begun.
  struct Left {
    uint64_t number : 24, first : 20, end : 20;
  };

  const int64_t index;
  alignas(64) std::atomic<Left> left = Left{};  // in a line of its own, because others only read it at their end
  std::atomic<pid_t> id = 0;
  std::atomic<int> core = -1;  // the last that it took a part on
  std::atomic<bool> takes_parts = false;
  bool gave_core = false;  // to another, so it leaves before its next part
  Member* next = nullptr;
  std::mutex moving;  // or another move would find, and keep, the cores of this one

  explicit Member(int64_t index) : index(index) {}

  // Return false if its processor time stands still. That of another process' thread, as after a fork, is unknown.
  bool runs() const {
    const clockid_t of_thread = ~clockid_t(id) * 8 + 6;  // as pthread_getcpuclockid has it
    timespec before{}, now{};
    if (clock_gettime(of_thread, &before) || clock_gettime(of_thread, &now)) return true;
    return before.tv_nsec != now.tv_nsec;
  }

  // Move it to the cores for which `may` returns true, while it takes parts, and return true. From then on the kernel
  // may move it anywhere, as before.
  template <class May>
  bool move(const May& may) {
    std::unique_lock lock(moving, std::try_to_lock);
    cpu_set_t allowed, chosen, now;
    if (!lock || !takes_parts || sched_getaffinity(id, sizeof allowed, &allowed)) return false;
    CPU_ZERO(&chosen);
    for (int core = 0; core < CPU_SETSIZE; core++)
      if (CPU_ISSET(core, &allowed) && may(core)) CPU_SET(core, &chosen);
    if (sched_setaffinity(id, sizeof chosen, &chosen)) return false;
    // It may take this thread's core at once, for milliseconds. Cores that a user gave it meanwhile are kept.
    if (!sched_getaffinity(id, sizeof now, &now) && CPU_EQUAL(&now, &chosen))
      sched_setaffinity(id, sizeof allowed, &allowed);
    return true;
  }
};

// Threads that run works, one after another. Each begins with its own share of the parts, one after the other, because
// memory is read faster so, and then takes the last ones of others. A work ends when its parts are done, whoever did
// them. Who finds no part waits in a loop for a moment, and then sleeps, so that its core is free for the thread that
// has one.
//
// A busy neighbour takes the core of a thread in the middle of a part, for some milliseconds, and the others wait. So
// who is about to sleep brings that thread to its own core, and later leaves for one where no member is. It shares that
// with the neighbour: the kernel would give the neighbour one core and the team the other.
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
    for (; started_ < threads - 1; started_++) {
      Member* member = new Member(started_ + 1);
      member->next = members_;
      members_ = member;
      std::thread([this, member] { help(*member); }).detach();
    }
    caller_.id = pid_t(syscall(SYS_gettid));
    next_ = works.data();
    end_ = next_ + works.size();
    ended_ = false;
    open();
    while (!ended_) wait(caller_, take_parts(caller_), [this] { return ended_.load(); });
    // Who moves this thread may have lost its core to it. It gives back all cores first: threads and processes started
    // from here have the same, and another thread may get this one's id.
    std::lock_guard moved(caller_.moving);
  }

 private:
  // The number of a work that is open, its parts, and the members that share them.
  struct Ticket {
    uint64_t number : 24, parts : 20, members : 20;
  };

  static constexpr auto PATIENCE = std::chrono::microseconds(40);  // about what it takes to wake a thread
  static constexpr auto INTERRUPTION = std::chrono::microseconds(100);  // few of the kernel's own are longer

  // Open the next work that has parts, or end.
  void open() {
    ++*heartbeat;
    while (next_ < end_ && (*next_)->parts == 0) next_++;
    const bool is_end = next_ == end_;
    Ticket ticket = ticket_.load();
    ticket.number++;
    ticket.parts = is_end ? 0 : (*next_)->parts;
    ticket.members = started_ + 1;
    if (!is_end) work_ = (next_++)->get();
    done_ = 0;
    ticket_ = ticket;
    if (is_end) ended_ = true;  // from here on another call may open its works
    if (sleeping_ == 0) return;
    { std::lock_guard lock(mutex_); }  // a thread has begun to sleep or will see the ticket
    wake_.notify_all();
  }

  // Take a part of a member's share, its first or its last. Return -1 if none is left, or another work is open.
  int64_t take(Ticket ticket, Member& of, bool is_first) {
    Member::Left left = of.left.load();
    while (true) {
      Member::Left taken = left;
      if (left.number != ticket.number) {  // nobody has begun the share, or it is of a later work
        if (ticket_.load().number != ticket.number) return -1;
        taken.number = ticket.number;
        taken.first = ticket.parts * of.index / ticket.members;
        taken.end = ticket.parts * (of.index + 1) / ticket.members;
      }
      if (taken.first == taken.end) return -1;
      const int64_t part = is_first ? taken.first++ : --taken.end;
      if (of.left.compare_exchange_weak(left, taken)) return part;
    }
  }

  // Take a part of this member's share, or of another's.
  int64_t take(Ticket ticket, Member& me) {
    int64_t part = take(ticket, me, true);
    for (Member* other = members_; part < 0 && other; other = other->next)
      if (other != &me) part = take(ticket, *other, false);
    return part;
  }

  // Run parts until none is left. Return the ticket that has none.
  Ticket take_parts(Member& me) {
    me.takes_parts = true;
    Ticket ticket = ticket_.load();
    for (int64_t part; (part = take(ticket, me)) >= 0; ticket = ticket_.load()) {
      if (me.gave_core) leave(me);
      me.core.store(sched_getcpu(), std::memory_order_relaxed);
      work_.load()->run(part);  // it stays open until this part is done
      if (++done_ == int64_t(ticket.parts)) open();
    }
    me.takes_parts = false;
    return ticket;
  }

  // Return true as soon as `is_done`, or false after that time.
  template <class Done>
  static bool spins(std::chrono::microseconds time, const Done& is_done) {
    for (const auto start = std::chrono::steady_clock::now(); std::chrono::steady_clock::now() - start < time;)
      for (int i = 0; i < 16; i++) {
        if (is_done()) return true;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      }
    return false;
  }

  // Wait until another work is open or `is_over`.
  template <class Over>
  void wait(Member& me, Ticket seen, const Over& is_over) {
    auto is_done = [&] { return ticket_.load().number != seen.number || is_over(); };
    if (spins(PATIENCE, is_done)) return;
    if (without_core(me)) {
      if (spins(INTERRUPTION, is_done)) return;
      if (Member* other = without_core(me))  // this core is about to be idle
        me.gave_core = other->move([here = sched_getcpu()](int core) { return core == here; });
    }
    std::unique_lock lock(mutex_);
    sleeping_++;
    wake_.wait(lock, is_done);
    sleeping_--;
  }

  // Return another member that has a part and no core, or null.
  Member* without_core(const Member& me) const {
    Member* other = members_;
    while (other && (other == &me || !other->takes_parts || other->runs())) other = other->next;
    return other;
  }

  // Leave this core for those where no other member was last.
  void leave(Member& me) {
    me.gave_core = false;
    me.move([&, here = sched_getcpu()](int core) {
      bool is_free = core != here;
      for (const Member* other = members_; other; other = other->next) is_free &= other == &me || other->core != core;
      return is_free;
    });
  }

  void help(Member& me) {
    me.id = pid_t(syscall(SYS_gettid));
    while (true) wait(me, take_parts(me), [] { return false; });
  }

  std::mutex turn_, mutex_;
  std::condition_variable wake_;
  std::atomic<Ticket> ticket_ = Ticket{};
  std::atomic<const Work*> work_ = nullptr;
  std::atomic<int64_t> done_ = 0, sleeping_ = 0;
  std::atomic<bool> ended_ = true;
  const std::unique_ptr<Work>*next_ = nullptr, *end_ = nullptr;
  int64_t started_ = 0;
  Member caller_{0};
  std::atomic<Member*> members_ = &caller_;
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
  const float* scales = nullptr;  // [out], of a weight of pack_int8
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

// Read row i into numbers [size] of the library's dtype.
void read_row(const Rows&, int64_t i, void* to);

void add_product(Works&, const Product&, int64_t threads);
void add_int8_product(Works&, const Product&, int64_t threads);
void add_rows(Works&, const Rows&, void* y);
void add_attention(Works&, const AttentionRows&, int64_t threads);
void add_rotation(Works&, const RotatedRows&, int64_t threads);

}  // namespace OPERATORS
