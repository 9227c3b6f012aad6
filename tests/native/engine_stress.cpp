// The engine under a sanitizer: several ranks in one process, a transport between threads with random delays, and
// three scenes: steady training, a failing transfer, and an engine stopped with buckets under way.
//
// Gradients are small signed integers times a power of two, different on every rank, so that fp32, bf16 and fp16 give
// the exact mean; int8 is checked against its error bound. Exits non-zero at the first wrong result.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <map>
#include <random>
#include <thread>

#include "../../csrc/engine.h"

using namespace fusedcomm;

namespace {

#define REQUIRE(condition, ...)                                            \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                   \
      std::fprintf(stderr, "\n");                                          \
      std::abort();                                                        \
    }                                                                      \
  } while (0)

// Collectives between threads: the last rank to arrive hands the meeting to a thread of the network, which waits a
// random moment, moves the bytes and completes every rank's part.
class Network {
 public:
  explicit Network(int world_size) : world_size_(world_size) {}
  ~Network() {
    for (auto& thread : threads_) thread.join();
  }

  struct Arrival {
    WireSpan send, receive;
    Lane::Completion done;
  };

  void arrive(Channel channel, int64_t sequence, int rank, Arrival arrival, bool sum_floats) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (sequence == fail_at) down_ = true;
    auto& meeting = meetings_[{static_cast<int>(channel), sequence}];
    if (meeting.empty()) meeting.resize(static_cast<size_t>(world_size_));
    REQUIRE(!meeting[static_cast<size_t>(rank)].done, "rank %d started collective %ld twice", rank, (long)sequence);
    meeting[static_cast<size_t>(rank)] = std::move(arrival);
    if (down_) {
      // As when a peer closes its connections: nothing under way or begun later can end well.
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
    threads_.emplace_back([parts = std::move(meeting), sum_floats, delay] {
      std::this_thread::sleep_for(delay);
      sum_floats ? all_reduce(parts) : all_to_all(parts);
      for (const Arrival& part : parts) part.done(nullptr);
    });
    meetings_.erase({static_cast<int>(channel), sequence});
  }

  std::atomic<int64_t> fail_at{-1};  // the network goes down at this collective

 private:
  static void all_to_all(const std::vector<Arrival>& parts) {
    const size_t p = parts.size(), nbytes = static_cast<size_t>(parts[0].send.nbytes) / p;
    for (size_t from = 0; from < p; ++from) {
      for (size_t to = 0; to < p; ++to) {
        std::memcpy(parts[to].receive.data + from * nbytes, parts[from].send.data + to * nbytes, nbytes);
      }
    }
  }

  static void all_reduce(const std::vector<Arrival>& parts) {
    const size_t numel = static_cast<size_t>(parts[0].send.nbytes) / 4;
    for (size_t i = 0; i < numel; ++i) {
      float sum = 0;
      for (const Arrival& part : parts) sum += reinterpret_cast<float*>(part.send.data)[i];
      for (const Arrival& part : parts) reinterpret_cast<float*>(part.send.data)[i] = sum;
    }
  }

  const int world_size_;
  std::mutex mutex_;
  bool down_ = false;
  std::mt19937 random_{7};
  std::map<std::pair<int, int64_t>, std::vector<Arrival>> meetings_;
  std::vector<std::thread> threads_;
};

class ThreadTransport : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Network> network, int rank, int world_size)
      : network_(std::move(network)), rank_(rank), world_size_(world_size) {}
  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }

  void all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override {
    network_->arrive(channel, next(channel), rank_, {std::move(send), std::move(receive), std::move(done)}, false);
  }
  int64_t gather_copies() const override { return world_size_; }
  void all_gather(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override {
    all_to_all(channel, std::move(send), std::move(receive), std::move(done));
  }
  void all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) override {
    REQUIRE(dtype == Wire::kFp32, "this network adds floats only");
    network_->arrive(channel, next(channel), rank_, {std::move(data), {}, std::move(done)}, true);
  }

 private:
  int64_t next(Channel channel) { return sequence_[static_cast<int>(channel)]++; }
  std::shared_ptr<Network> network_;
  const int rank_, world_size_;
  int64_t sequence_[2] = {0, 0};  // each channel belongs to one lane
};

struct Bucket {
  std::vector<float> gradients;
  int64_t exact_numel;  // the first of them are exempt
};

float gradient(int rank, int step, size_t bucket, size_t i) {
  const int value = static_cast<int>((i * 7 + bucket * 5 + static_cast<size_t>(step) * 3) % 15) - 7;
  return static_cast<float>(value * (rank + 1)) * 0.25F;
}

// One rank's training loop. Returns the number of steps that ended without an error.
int train(Engine& engine, const std::vector<std::pair<int64_t, int64_t>>& shapes, int num_steps) {
  const int rank = engine.rank(), p = engine.world_size();
  for (int step = 0; step < num_steps; ++step) {
    std::vector<std::shared_ptr<Bucket>> buckets;
    std::vector<std::future<void>> done;
    for (size_t b = 0; b < shapes.size(); ++b) {
      auto bucket = std::make_shared<Bucket>();
      bucket->gradients.resize(static_cast<size_t>(shapes[b].first));
      bucket->exact_numel = shapes[b].second;
      for (size_t i = 0; i < bucket->gradients.size(); ++i) bucket->gradients[i] = gradient(rank, step, b, i);
      buckets.push_back(std::move(bucket));
    }
    for (size_t b = 0; b < shapes.size(); ++b) {
      Bucket& bucket = *buckets[b];
      const int64_t numel = static_cast<int64_t>(bucket.gradients.size());
      auto job = std::make_shared<BucketJob>();
      job->owner = buckets[b];
      job->plan = plan_bucket(engine.config(), p, GradDtype::kFloat32, bucket.exact_numel, numel - bucket.exact_numel);
      Stream& head = job->plan.layout.exact_numel != 0 ? job->streams.exact : job->streams.lossy;
      head.append(bucket.gradients.data(), bucket.exact_numel, GradDtype::kFloat32);
      job->streams.lossy.append(bucket.gradients.data() + bucket.exact_numel, numel - bucket.exact_numel,
                                GradDtype::kFloat32);
      job->label = std::make_shared<const BucketLabel>("bucket " + std::to_string(b), "bucket " + std::to_string(b));
      job->is_last = b + 1 == shapes.size();
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
      for (size_t i = 0; i < buckets[b]->gradients.size(); ++i) {
        double mean = 0, largest = 0;
        for (int r = 0; r < p; ++r) {
          mean += gradient(r, step, b, i) / p;
          largest = std::max(largest, 7 * 0.25 * (r + 1));
        }
        const bool lossy = engine.config().wire == Wire::kInt8 && static_cast<int64_t>(i) >= buckets[b]->exact_numel;
        const double tolerance = lossy ? 2 * largest / 127 : 1e-6;
        REQUIRE(std::fabs(buckets[b]->gradients[i] - mean) <= tolerance, "step %d bucket %zu element %zu: %g, not %g",
                step, b, i, buckets[b]->gradients[i], mean);
      }
    }
  }
  return num_steps;
}

enum class Scene { kSteady, kTransferFails, kStopped };

void play(Scene scene, Wire wire, Sum sum, int world_size, int num_threads) {
  auto network = std::make_shared<Network>(world_size);
  if (scene == Scene::kTransferFails) network->fail_at = 17;
  WireConfig config;
  config.wire = wire;
  config.sum = sum;
  config.max_chunk_nbytes = 8192;
  config.num_slots = 3;
  const std::vector<std::pair<int64_t, int64_t>> shapes = {{20011, 100}, {1, 0}, {0, 0}, {4096, 4096}, {9001, 1}};
  const int num_steps = scene == Scene::kSteady ? 12 : 1000;
  std::vector<int> finished(static_cast<size_t>(world_size));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.emplace_back([&, rank] {
      Engine engine(config, std::make_shared<CpuDevice>("auto", num_threads),
                    std::make_shared<ThreadTransport>(network, rank, world_size));
      std::thread stopper;
      if (scene == Scene::kStopped) {
        stopper = std::thread([&engine] {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          engine.stop("this scene stops it");
        });
      }
      finished[static_cast<size_t>(rank)] = train(engine, shapes, num_steps);
      if (stopper.joinable()) stopper.join();
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
    }
  }
  for (const Wire wire : {Wire::kFp32, Wire::kInt8}) {
    play(Scene::kTransferFails, wire, Sum::kTwoShot, 3, 1);
    play(Scene::kStopped, wire, Sum::kTwoShot, 3, 2);
  }
  play(Scene::kTransferFails, Wire::kFp32, Sum::kExact, 2, 1);
  play(Scene::kStopped, Wire::kFp32, Sum::kExact, 2, 1);
  std::puts("engine_stress: every bucket as expected");
  return 0;
}
