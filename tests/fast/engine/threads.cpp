// Promises of the operators' threads: `threads PROMISE`. One that is not kept ends with 1, or not at all.

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>

#include "work.h"

using namespace OPERATORS;

namespace {

constexpr int64_t THREADS = 3;

struct Parts {
  int64_t count;
  std::function<void(int64_t)> one;
};

void run(const std::vector<Parts>& all) {
  Works works;
  for (const Parts& parts : all) works.push_back(std::make_unique<Function>(parts.count, parts.one));
  team().run(works, THREADS);
}

int own_id() { return int(syscall(SYS_gettid)); }

std::string file_of(int thread, const std::string& name) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/" + name);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool sleeps(int thread) { return file_of(thread, "status").find("State:\tS") != std::string::npos; }

template <class Condition>
void until(const Condition& condition) {
  while (!condition()) usleep(1000);
}

// Return the threads of the team, this one among them: each has a part that waits for those of the others.
std::set<int> members() {
  std::set<int> found;
  std::mutex lock;
  std::atomic<int64_t> begun = 0;
  run({{THREADS, [&](int64_t) {
          begun++;
          until([&] { return begun == THREADS; });
          std::lock_guard guard(lock);
          found.insert(own_id());
        }}});
  return found;
}

// The first part of each work ends last.
bool others_take_the_parts_of_a_slow_thread() {
  std::atomic<int64_t> done = 0;
  const Parts work = {50, [&](int64_t part) {
                        if (part == 0) until([&] { return done % 50 == 49; });
                        done++;
                      }};
  run({work, work, work});
  return done == 150;
}

// Nobody takes a second part before all have a first one.
bool each_thread_begins_with_its_own_share_in_order() {
  constexpr int64_t SHARE = 10;
  std::map<int, std::vector<int64_t>> taken;
  std::mutex lock;
  std::atomic<size_t> begun = 0;
  run({{THREADS * SHARE, [&](int64_t part) {
          {
            std::lock_guard guard(lock);
            taken[own_id()].push_back(part);
            begun = taken.size();
          }
          until([&] { return begun == THREADS; });
        }}});
  std::set<int64_t> shares;
  for (const auto& [thread, parts] : taken) {
    shares.insert(parts[0]);
    for (size_t i = 1; i < parts.size() && parts[i] / SHARE == parts[0] / SHARE; i++)
      if (parts[i] != parts[i - 1] + 1) return false;
  }
  return shares == std::set<int64_t>{0, SHARE, 2 * SHARE};
}

bool who_has_no_part_sleeps_while_another_has_the_last() {
  const std::set<int> all = members();
  bool slept = false;
  run({{1, [&](int64_t) {
          for (const int thread : all)
            if (thread != own_id()) until([&] { return sleeps(thread); });
          slept = true;
        }}});
  return slept;
}

bool threads_without_work_do_not_run() {
  auto others = members();
  others.erase(own_id());
  for (const int thread : others) until([&] { return sleeps(thread); });
  auto times = [&] {
    std::string all;
    for (const int thread : others) all += file_of(thread, "schedstat");  // time on a core, time in a queue, turns
    return all;
  };
  const std::string before = times();
  usleep(100'000);
  return times() == before;
}

// A thread that sleeps in its part is brought to the cores of those that wait for it.
bool threads_may_run_on_all_cores_of_the_process_whoever_waited_for_them() {
  cpu_set_t before, now;
  sched_getaffinity(0, sizeof before, &before);
  const std::set<int> all = members();
  const Parts late = {2, [](int64_t) { usleep(2000); }}, later = {1, late.one};
  for (int round = 0; round < 20; round++) run({late, later});
  for (const int thread : all)
    until([&] { return sched_getaffinity(thread, sizeof now, &now) == 0 && CPU_EQUAL(&now, &before); });
  return true;
}

// Parts that compute, by more threads than cores: who is moved at the end of a call may go on before who moves it.
bool a_call_returns_with_all_cores_of_the_process() {
  cpu_set_t before, now;
  sched_getaffinity(0, sizeof before, &before);
  const Parts some = {4, [](int64_t part) {
                        const auto start = std::chrono::steady_clock::now();
                        while (std::chrono::steady_clock::now() - start < std::chrono::microseconds(30 * part)) {}
                      }};
  for (int round = 0; round < 300; round++) {
    run({some, some, some});
    sched_getaffinity(0, sizeof now, &now);
    if (!CPU_EQUAL(&now, &before)) return false;
  }
  return true;
}

// Each work needs all results of the one before.
bool results_are_equal_however_slow_a_thread_is() {
  constexpr int64_t WORKS = 200, MOST = 9;
  auto chain = [](bool is_shared) {
    std::vector<std::vector<uint64_t>> results(WORKS + 1, std::vector<uint64_t>(MOST, 1));
    std::vector<Parts> works;
    for (int64_t i = 0; i < WORKS; i++)
      works.push_back({i % (MOST + 1), [&results, i, is_shared](int64_t part) {
                         const auto& before = results[i];
                         thread_local std::minstd_rand draw(own_id());
                         if (is_shared && draw() % 20 == 0) usleep(draw() % 300);
                         results[i + 1][part] = std::accumulate(before.begin(), before.end(), uint64_t(part)) * 31;
                       }});
    if (is_shared) run(works);
    else
      for (const Parts& work : works)
        for (int64_t part = 0; part < work.count; part++) work.one(part);
    return results;
  };
  const auto expected = chain(false);
  for (int round = 0; round < 5; round++)
    if (chain(true) != expected) return false;
  return true;
}

bool calls_of_many_threads_take_turns() {
  std::atomic<int64_t> done = 0;
  auto call = [&] {
    for (int i = 0; i < 50; i++) run({{5, [&](int64_t) { done++; }}, {0, {}}, {7, [&](int64_t) { done++; }}});
  };
  std::thread one(call), two(call);
  call();
  one.join();
  two.join();
  return done == 3 * 50 * 12;
}

const std::vector<std::pair<std::string, bool (*)()>> PROMISES = {
    {"others take the parts of a slow thread", others_take_the_parts_of_a_slow_thread},
    {"each thread begins with its own share in order", each_thread_begins_with_its_own_share_in_order},
    {"who has no part sleeps while another has the last", who_has_no_part_sleeps_while_another_has_the_last},
    {"threads without work do not run", threads_without_work_do_not_run},
    {"threads may run on all cores of the process, whoever waited for them",
     threads_may_run_on_all_cores_of_the_process_whoever_waited_for_them},
    {"a call returns with all cores of the process", a_call_returns_with_all_cores_of_the_process},
    {"results are equal however slow a thread is", results_are_equal_however_slow_a_thread_is},
    {"calls of many threads take turns", calls_of_many_threads_take_turns},
};

}  // namespace

int main(int, char** arguments) {
  for (const auto& [name, keeps] : PROMISES)
    if (name == arguments[1]) return keeps() ? 0 : 1;
  return 2;
}
