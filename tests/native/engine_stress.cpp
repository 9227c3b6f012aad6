// Runs the engine under a sanitizer: several ranks in one process, over a transport between threads that has random
// delays. There are three scenes: steady training, a failing transfer, and an engine that is stopped while it works on
// buckets.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "devices/cpu_device.h"
#include "engine/engine.h"
#include "require.h"

using namespace fusedcomm;

namespace {

// ---- buckets whose mean is known: gradients are small signed integers times a power of two, different on every rank

// By bucket: the number of elements, and how many of them are exact. The exact elements come first.
using Shapes = std::vector<std::pair<int64_t, int64_t>>;

struct Bucket {
  Bucket(int64_t numel, int64_t num_exempt) : gradients(static_cast<size_t>(numel)), exact_numel(num_exempt) {}
  std::vector<float> gradients;
  int64_t exact_numel;
};

float gradient(int rank, int step, size_t bucket, size_t i) {
  const int value = static_cast<int>((i * 7 + bucket * 5 + static_cast<size_t>(step) * 3) % 15) - 7;
  return static_cast<float>(value * (rank + 1)) * 0.25F;
}

void fill(Bucket* bucket, int rank, int step, size_t index) {
  for (size_t i = 0; i < bucket->gradients.size(); ++i) bucket->gradients[i] = gradient(rank, step, index, i);
}

// Returns a text on the first wrong element; empty if all elements are right.
std::string find_wrong(const Bucket& bucket, const WireConfig& config, int world_size, int step, size_t index) {
  for (size_t i = 0; i < bucket.gradients.size(); ++i) {
    double mean = 0, largest = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      mean += gradient(rank, step, index, i) / world_size;
      largest = std::max(largest, 7 * 0.25 * (rank + 1));
    }
    const bool lossy = config.wire == Wire::kInt8 && static_cast<int64_t>(i) >= bucket.exact_numel;
    const double tolerance = lossy ? 2 * largest / 127 : 1e-6;
    if (!(std::fabs(bucket.gradients[i] - mean) <= tolerance)) {
      return "step " + std::to_string(step) + " bucket " + std::to_string(index) + " element " + std::to_string(i) +
             ": " + std::to_string(bucket.gradients[i]) + ", not " + std::to_string(mean);
    }
  }
  return "";
}

// Makes a bucket's job. The caller must still set on_done.
std::shared_ptr<BucketJob> make_job(const Engine& engine, const std::shared_ptr<Bucket>& bucket, size_t index,
                                    bool is_last) {
  const auto numel = static_cast<int64_t>(bucket->gradients.size());
  auto job = std::make_shared<BucketJob>();
  job->owner = bucket;
  const ListNumels numels{bucket->exact_numel, {numel - bucket->exact_numel}, numel};
  job->plan = std::make_shared<const BucketPlan>(
      plan_bucket(engine.config(), engine.world_size(), GradDtype::kFloat32, numels));
  Payload payload;
  BucketSlices& slices = payload.slices;
  slices.origin = bucket->gradients.data();
  SliceList& head = job->plan->exact_numel() != 0 ? slices.exact : slices.lossy;
  head.append(bucket->gradients.data(), bucket->exact_numel, GradDtype::kFloat32);
  slices.lossy.append(bucket->gradients.data() + bucket->exact_numel, numel - bucket->exact_numel, GradDtype::kFloat32);
  job->payloads.push_back(std::move(payload));
  const std::string name = "bucket " + std::to_string(index);
  job->label = std::make_shared<const BucketLabel>(name, name + " (" + std::to_string(numel) + " elements)");
  job->is_last = is_last;
  job->grad_nbytes = numel * 4;
  return job;
}

// A rank's place if ranks are assigned to hosts in order: the first `ranks_per_host` ranks are on the first host.
Place place_of(int rank, int world_size, int64_t ranks_per_host) {
  return {rank % ranks_per_host, ranks_per_host, rank / ranks_per_host, world_size / ranks_per_host};
}

// The group of ranks that a channel connects this rank with: the group's number, this rank's index in it, its size.
struct Group {
  int64_t id, index, size;
};

Group group_of(Channel channel, const Place& place, int rank, int world_size) {
  switch (channel) {
    case Channel::kLocalScatter:
    case Channel::kLocalGather:
      return {place.host, place.local_rank, place.ranks_per_host};
    case Channel::kCrossScatter:
    case Channel::kCrossGather:
      return {place.local_rank, place.host, place.num_hosts};
    default:
      return {0, rank, world_size};
  }
}

// One rank's share of a collective.
struct Part {
  std::byte* send;
  std::byte* receive;  // unused in an all-reduce, whose sum replaces the sent bytes
  int64_t nbytes;      // of `send`
};

void move_all_to_all(const std::vector<Part>& parts) {
  const size_t p = parts.size(), nbytes = static_cast<size_t>(parts[0].nbytes) / p;
  for (size_t from = 0; from < p; ++from) {
    for (size_t to = 0; to < p; ++to) {
      std::memcpy(parts[to].receive + from * nbytes, parts[from].send + to * nbytes, nbytes);
    }
  }
}

void move_all_gather(const std::vector<Part>& parts) {
  const auto nbytes = static_cast<size_t>(parts[0].nbytes);
  for (size_t from = 0; from < parts.size(); ++from) {
    for (const Part& to : parts) {
      std::byte* const place = to.receive + from * nbytes;
      if (place != parts[from].send) std::memcpy(place, parts[from].send, nbytes);  // equal if it is in place
    }
  }
}

void add_all_reduce(const std::vector<Part>& parts) {
  const size_t numel = static_cast<size_t>(parts[0].nbytes) / 4;
  for (size_t i = 0; i < numel; ++i) {
    float sum = 0;
    for (const Part& part : parts) sum += reinterpret_cast<float*>(part.send)[i];
    for (const Part& part : parts) reinterpret_cast<float*>(part.send)[i] = sum;
  }
}

// ---- the network

// Collectives between threads. The last rank to arrive hands the collective to a new thread, which waits for a random
// time, moves the bytes and completes every rank's part.
class Network {
 public:
  ~Network() {
    for (auto& thread : threads_) thread.join();
  }

  struct Arrival {
    WireSpan send, receive;
    Lane::Completion done;
  };

  using Move = void (*)(const std::vector<Part>&);

  void arrive(Channel channel, const Group& group, int64_t sequence, Arrival arrival, Move move) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (sequence == fail_at) down_ = true;
    const Key key{static_cast<int>(channel), group.id, sequence};
    auto& meeting = meetings_[key];
    if (meeting.empty()) meeting.resize(static_cast<size_t>(group.size));
    Arrival& own = meeting[static_cast<size_t>(group.index)];
    REQUIRE(!own.done, "rank %ld of a group started collective %ld twice", (long)group.index, (long)sequence);
    own = std::move(arrival);
    if (down_) {
      // It is as if a peer had closed its connections: every collective under way fails, and every later one.
      auto abandoned = std::move(meetings_);
      meetings_.clear();
      lock.unlock();
      const auto error = std::make_exception_ptr(std::runtime_error("Connection closed by peer"));
      for (auto& [key, parts] : abandoned) {
        for (const Arrival& part : parts) {
          if (part.done) part.done(error);
        }
      }
      return;
    }
    if (!std::all_of(meeting.begin(), meeting.end(), [](const Arrival& a) { return bool(a.done); })) return;
    const auto delay = std::chrono::microseconds(random_() % 200);
    threads_.emplace_back([parts = std::move(meeting), move, delay] {
      std::this_thread::sleep_for(delay);
      std::vector<Part> bytes;
      for (const Arrival& part : parts) bytes.push_back({part.send.data, part.receive.data, part.send.nbytes});
      move(bytes);
      for (const Arrival& part : parts) part.done(nullptr);
    });
    meetings_.erase(key);
  }

  std::atomic<int64_t> fail_at{-1};  // the network goes down at the collective with this number; -1: never

 private:
  using Key = std::tuple<int, int64_t, int64_t>;  // channel, group, sequence
  std::mutex mutex_;
  bool down_ = false;
  std::mt19937 random_{7};
  std::map<Key, std::vector<Arrival>> meetings_;
  std::vector<std::thread> threads_;
};

class ThreadTransport : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Network> network, int rank, int world_size, int64_t ranks_per_host)
      : network_(std::move(network)),
        rank_(rank),
        world_size_(world_size),
        place_(place_of(rank, world_size, ranks_per_host)) {}
  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  Place place() const override { return place_; }

  void all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override {
    network_->arrive(channel, group(channel), next(channel), {std::move(send), std::move(receive), std::move(done)},
                     move_all_to_all);
  }
  void all_gather(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override {
    network_->arrive(channel, group(channel), next(channel), {std::move(send), std::move(receive), std::move(done)},
                     move_all_gather);
  }
  void all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) override {
    REQUIRE(dtype == Wire::kFp32, "this network adds floats only");
    network_->arrive(channel, group(channel), next(channel), {std::move(data), {}, std::move(done)}, add_all_reduce);
  }

 private:
  Group group(Channel channel) const { return group_of(channel, place_, rank_, world_size_); }
  int64_t next(Channel channel) { return sequence_[static_cast<int>(channel)]++; }
  std::shared_ptr<Network> network_;
  const int rank_, world_size_;
  const Place place_;
  int64_t sequence_[kNumChannels] = {};  // needs no lock: each channel is used by one lane only
};

// Runs one rank's training loop up to its first error. Returns the number of steps that ended without an error.
int train(Engine& engine, const Shapes& shapes, int num_steps) {
  const int rank = engine.rank(), p = engine.world_size();
  for (int step = 0; step < num_steps; ++step) {
    std::vector<std::shared_ptr<Bucket>> buckets;
    std::vector<std::future<void>> done;
    for (size_t b = 0; b < shapes.size(); ++b) {
      buckets.push_back(std::make_shared<Bucket>(shapes[b].first, shapes[b].second));
      fill(buckets[b].get(), rank, step, b);
    }
    for (size_t b = 0; b < shapes.size(); ++b) {
      auto job = make_job(engine, buckets[b], b, b + 1 == shapes.size());
      auto promise = std::make_shared<std::promise<void>>();
      done.push_back(promise->get_future());
      job->on_done = [promise](std::exception_ptr error) {
        error ? promise->set_exception(error) : promise->set_value();
      };
      engine.submit(std::move(job));
      if (b == static_cast<size_t>(rank) % shapes.size()) std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
    std::exception_ptr error;
    for (auto& future : done) {
      try {
        future.get();
      } catch (...) {
        error = std::current_exception();
      }
    }
    if (error) return step;
    for (size_t b = 0; b < shapes.size(); ++b) {
      const std::string wrong = find_wrong(*buckets[b], engine.config(), p, step, b);
      REQUIRE(wrong.empty(), "%s", wrong.c_str());
    }
  }
  return num_steps;
}

// Reads the board as a watch does, but more often, and the stats as a training script may.
void watch(Engine& engine, const std::atomic<bool>& trained) {
  Board& board = *engine.board();
  Board::View before = board.view(Board::Clock::now());
  while (!trained) {
    engine.stats();
    const Board::View view = board.view(Board::Clock::now());
    REQUIRE(view.num_ended <= view.num_handed && (view.num_ended < view.num_handed) == bool(view.label),
            "%ld of %ld buckets ended", (long)view.num_ended, (long)view.num_handed);
    REQUIRE(before.num_ended <= view.num_ended && before.last_step <= view.last_step, "the board's counts decreased");
    before = view;
    std::this_thread::sleep_for(std::chrono::microseconds(500));
  }
}

enum class Scene { kSteady, kTransferFails, kStopped };

void play(Scene scene, Wire wire, Sum sum, int world_size, int num_threads, int64_t ranks_per_host = 1,
          int64_t num_slots = 3) {
  auto network = std::make_shared<Network>();
  if (scene == Scene::kTransferFails) network->fail_at = 17;
  WireConfig config;
  config.wire = wire;
  config.sum = sum;
  config.max_chunk_nbytes = 8192;
  config.num_slots = num_slots;
  config.ranks_per_host = ranks_per_host;
  const Shapes shapes = {{20011, 100}, {1, 0}, {0, 0}, {4096, 4096}, {9001, 1}};
  const int num_steps = scene == Scene::kSteady ? 12 : 1000;
  std::vector<int> finished(static_cast<size_t>(world_size));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.emplace_back([&, rank] {
      Engine engine(config, std::make_shared<CpuDevice>("auto", num_threads),
                    std::make_shared<ThreadTransport>(network, rank, world_size, ranks_per_host));
      std::atomic<int> num_explained{0};
      engine.explain_failures_with([&num_explained](const std::string&) {
        ++num_explained;
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        return "explained";
      });
      std::atomic<bool> trained{false};
      std::thread watcher([&] { watch(engine, trained); });
      std::thread stopper;
      if (scene == Scene::kStopped) {
        stopper = std::thread([&engine] {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          engine.stop("this scene stops it");
        });
      }
      finished[static_cast<size_t>(rank)] = train(engine, shapes, num_steps);
      if (stopper.joinable()) stopper.join();
      trained = true;
      watcher.join();
      const int num_failures = scene == Scene::kTransferFails ? 1 : 0;
      REQUIRE(scene == Scene::kStopped || num_explained == num_failures, "%d failures explained", num_explained.load());
      const Board::View view = engine.board()->view(Board::Clock::now());
      REQUIRE(scene != Scene::kSteady || (!view.label && view.num_ended == num_steps * (int64_t)shapes.size()),
              "%ld buckets ended", (long)view.num_ended);
    });
  }
  for (auto& thread : ranks) thread.join();
  for (const int steps : finished) {
    REQUIRE((steps == num_steps) == (scene == Scene::kSteady), "%d of %d steps ended well", steps, num_steps);
  }
}

}  // namespace

int main() {
  for (const int world_size : {1, 2, 3, 4}) {
    for (const int num_threads : {1, 2}) {
      play(Scene::kSteady, Wire::kFp32, Sum::kAuto, world_size, num_threads);
      play(Scene::kSteady, Wire::kFp32, Sum::kTwoShot, world_size, num_threads);
      play(Scene::kSteady, Wire::kInt8, Sum::kAuto, world_size, num_threads);
      play(Scene::kSteady, Wire::kInt8, Sum::kOneShot, world_size, num_threads);
    }
  }
  for (const Wire wire : {Wire::kFp32, Wire::kInt8}) {
    play(Scene::kTransferFails, wire, Sum::kTwoShot, 3, 1);
    play(Scene::kStopped, wire, Sum::kTwoShot, 3, 2);
    play(Scene::kTransferFails, wire, Sum::kOneShot, 3, 1);
    play(Scene::kStopped, wire, Sum::kOneShot, 2, 2);
  }
  for (const int64_t num_slots : {1, 2, 3, 5}) {
    play(Scene::kSteady, Wire::kInt8, Sum::kAuto, 4, 1, 2, num_slots);
    play(Scene::kSteady, Wire::kBf16, Sum::kTwoShot, 6, 1, 3, num_slots);
    play(Scene::kSteady, Wire::kInt8, Sum::kTwoShot, 6, 2, 2, num_slots);
    play(Scene::kTransferFails, Wire::kInt8, Sum::kTwoShot, 4, 1, 2, num_slots);
    play(Scene::kStopped, Wire::kInt8, Sum::kTwoShot, 4, 1, 2, num_slots);
  }
  play(Scene::kTransferFails, Wire::kFp32, Sum::kExact, 2, 1);
  play(Scene::kStopped, Wire::kFp32, Sum::kExact, 2, 1);
  std::puts("engine_stress: every bucket as expected");
  return 0;
}
