// Runs the engine over streams without an accelerator. Its lanes are StreamLanes on simulated streams
// (sim_accelerator.h), and roles are mapped to streams as CudaDevice maps them. Ranks are threads. A collective is
// enqueued on the current stream and waits there for the other ranks, as NCCL's do. The backward pass writes the
// gradients on a compute stream, and the optimizer reads them there after the wait that DDP's future enqueues. The host
// never waits.
//
//   stream_stress [scene] [--seed N]    one scene or all of them; the streams' pauses derive from the seed
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <limits>
#include <map>
#include <mutex>
#include <thread>

#include "codec/codec.h"
#include "devices/stream_device.h"
#include "run_scene.h"
#include "sim_accelerator.h"
#include "training.h"

using namespace training;

namespace {

constexpr int64_t kWhole = std::numeric_limits<int64_t>::max();

// An access to all gradients of a bucket. Section 0 holds its lossy elements, section 1 its exact ones. A workspace has
// only section 0.
std::vector<sim::Access> whole_bucket(const void* gradients, bool writes) {
  return {{gradients, 0, 0, kWhole, writes}, {gradients, 1, 0, kWhole, writes}};
}

enum class Fail {
  kNothing,
  kPackThrows,
  kPackFaults,
  kTransferThrows,
  kTransferEndsWithError,
  kTransferForgets,
  kTransferFaults
};

struct Setup {
  WireConfig config;  // its ranks_per_host determines which ranks share a host
  int world_size = 1;
  Shapes shapes;
  // Whether one more bucket comes first, which is passed through like a DDP bucket that the codec cannot encode.
  bool passthrough = false;
  // Whether each of its stages runs on its own lane; otherwise all of them run on the wire's.
  bool staged = false;
  bool forced_sync = false;
  int slow_stream = 0;  // the stream of rank 0 with long pauses; every further rank's is the next stream
  // What fails on rank 0.
  Fail fail = Fail::kNothing;
  // The number of the pack or transfer that fails, from 0.
  int64_t fail_at = -1;
};

// ---- a device like CudaDevice, with the CPU's codec in place of kernels

// Whether this rank's arranged failure has happened on the host.
using HasFailed = std::shared_ptr<bool>;

class SimDevice : public StreamDevice {
 public:
  SimDevice(int index, const Setup& setup, HasFailed has_failed)
      : StreamDevice(sim::device(index), setup.forced_sync),
        fail_(index == 0 ? setup.fail : Fail::kNothing),
        fail_at_(setup.fail_at),
        has_failed_(std::move(has_failed)),
        codec_(std::make_shared<Codec>("auto", 1)) {}

  const std::string& isa() const override { return codec_->isa(); }
  // Some buckets of one chunk are larger.
  int64_t max_nbytes_on_wire() const override { return 8192; }

  std::shared_ptr<std::byte> allocate(int64_t nbytes) override {
    std::byte* const data = sim::allocate(current_stream(), nbytes);
    for (const c10::Stream& stream : streams()) sim::record_use(data, stream);
    return {data, [](std::byte* memory) { sim::give_back(memory); }};
  }

  int64_t pack(const PackArgs& args) override {
    check_stream(is_on_wire(args.layout, args.slices) ? 1 : 0);
    std::vector<sim::Access> accesses = chunk_of_bucket(args.layout, args.chunk, args.slices, false);
    accesses.push_back({args.out, 0, 0, args.layout.chunk_nbytes(), true});
    launch_pack(accesses, [codec = codec_, layout = args.layout, chunk = args.chunk, slices = args.slices,
                           scale = args.scale, out = args.out] { codec->pack({layout, chunk, slices, scale, out}); });
    return 0;
  }

  int64_t scale_in_place(const BucketSlices& slices, float scale) override {
    launch_pack(whole_bucket(slices.origin, true),
                [codec = codec_, slices, scale] { codec->scale_in_place(slices.lossy, scale); });
    return 0;
  }

  void reduce(const ReduceArgs& args) override {
    check_stream(args.to.num_chunks == 1 ? 1 : 2);
    sim::launch(current_stream(), "reduce",
                {{args.parts, 0, 0, args.from.chunk_nbytes(), false},
                 {args.out, 0, 0, args.to.part_stride * args.num_parts, true}},
                [codec = codec_, from = args.from, parts = args.parts, scale = args.scale, to = args.to, out = args.out,
                 num_parts = args.num_parts,
                 chunk = args.chunk] { codec->reduce({from, parts, scale, to, out, num_parts, chunk}); });
  }

  void unpack(const UnpackArgs& args) override {
    std::vector<sim::Access> accesses = chunk_of_bucket(args.layout, args.chunk, args.slices, true);
    accesses.push_back({args.parts, 0, 0, args.layout.chunk_nbytes() * args.num_messages, false});
    check_stream(is_on_wire(args.layout, args.slices) ? 1 : 2);
    sim::launch(
        current_stream(), "unpack", accesses,
        [codec = codec_, layout = args.layout, chunk = args.chunk, parts = args.parts, scale = args.scale,
         slices = args.slices, num = args.num_messages] { codec->unpack({layout, chunk, parts, scale, slices, num}); });
  }

 private:
  bool is_on_wire(const BucketLayout& layout, const BucketSlices& slices) const {
    return layout.num_chunks == 1 && (slices.lossy.numel() + slices.exact.numel()) * 4 <= max_nbytes_on_wire();
  }
  void check_stream(size_t i) const { REQUIRE(current_stream() == streams()[i], "a kernel on another lane's stream"); }

  static std::vector<sim::Access> chunk_of_bucket(const BucketLayout& layout, int64_t chunk, const BucketSlices& slices,
                                                  bool writes) {
    const int64_t last = layout.num_parts - 1;
    return {{slices.origin, 0, layout.lossy_range(chunk, 0).begin, layout.lossy_range(chunk, last).end, writes},
            {slices.origin, 1, layout.exact_range(chunk, 0).begin, layout.exact_range(chunk, last).end, writes}};
  }

  void launch_pack(const std::vector<sim::Access>& accesses, std::function<void()> work) {
    const bool fails = num_packs_++ == fail_at_;
    if (fails && fail_ == Fail::kPackThrows) {
      *has_failed_ = true;
      throw std::runtime_error("simulated failure of a launch");
    }
    if (fails && fail_ == Fail::kPackFaults) work = [] { throw std::runtime_error("illegal address"); };
    sim::launch(current_stream(), "pack", accesses, std::move(work));
  }

  const Fail fail_;
  const int64_t fail_at_;
  const HasFailed has_failed_;
  const std::shared_ptr<const Codec> codec_;
  int64_t num_packs_ = 0;
};

// ---- collectives on streams

enum class Kind { kAllToAll, kAllGather, kAllReduce, kAllReduceBf16 };

// A communicator. Level 0 connects all ranks, level 1 the ranks of a host, level 2 the ranks with the same local rank.
struct Communicator {
  int level;
  Group group;
  // Both channels of a level share a communicator.
  static Communicator of(Channel channel, const Place& place, int rank, int world_size) {
    return {static_cast<int>(channel) / 2, group_of(channel, place, rank, world_size)};
  }
};

class Network {
 public:
  // Called on a stream's thread. Blocks until all ranks of the group have called it. Moves nothing if the network is
  // down.
  void meet(const Communicator& communicator, int64_t sequence, Kind kind, Part part) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (down_) return;
    const Group& group = communicator.group;
    int64_t& num_ended = num_ended_[{communicator.level, group.id}];
    Meeting& meeting = meetings_[{communicator.level, group.id, sequence}];
    if (meeting.parts.empty()) {
      meeting.parts.resize(static_cast<size_t>(group.size));
      meeting.kind = kind;
      meeting.nbytes = part.nbytes;
    }
    REQUIRE(meeting.kind == kind && meeting.nbytes == part.nbytes, "collective %ld differs on rank %ld",
            static_cast<long>(sequence), static_cast<long>(group.index));
    meeting.parts[static_cast<size_t>(group.index)] = part;
    if (++meeting.num_there == group.size) {
      switch (kind) {
        case Kind::kAllToAll:
          move_all_to_all(meeting.parts);
          break;
        case Kind::kAllGather:
          move_all_gather(meeting.parts);
          break;
        case Kind::kAllReduce:
          add_all_reduce(meeting.parts);
          break;
        case Kind::kAllReduceBf16:
          add_all_reduce_bf16(meeting.parts);
          break;
      }
      meetings_.erase({communicator.level, group.id, sequence});
      num_ended = sequence + 1;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return down_ || num_ended > sequence; });
    }
  }

  void go_down() {
    std::lock_guard<std::mutex> lock(mutex_);
    down_ = true;
    changed_.notify_all();
  }
  bool is_down() {
    std::lock_guard<std::mutex> lock(mutex_);
    return down_;
  }

 private:
  struct Meeting {
    Kind kind = Kind::kAllToAll;
    int64_t nbytes = 0;
    int64_t num_there = 0;
    std::vector<Part> parts;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  bool down_ = false;
  std::map<std::pair<int, int64_t>, int64_t> num_ended_;           // by level and group
  std::map<std::tuple<int, int64_t, int64_t>, Meeting> meetings_;  // by level, group and sequence
};

// Like NCCL on the current stream, this transport keeps no memory alive.
class SimTransport : public Transport {
 public:
  SimTransport(std::shared_ptr<Network> network, int rank, const Setup& setup, HasFailed has_failed)
      : network_(std::move(network)),
        rank_(rank),
        world_size_(setup.world_size),
        place_(place_of(rank, setup.world_size, setup.config.ranks_per_host)),
        fail_(rank == 0 ? setup.fail : Fail::kNothing),
        fail_at_(setup.fail_at),
        has_failed_(std::move(has_failed)) {}
  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  Place place() const override { return place_; }

  void all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override {
    enqueue(channel, Kind::kAllToAll, "all-to-all", send, receive, done);
  }
  void all_gather(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override {
    enqueue(channel, Kind::kAllGather, "all-gather", send, receive, done);
  }
  void all_gather_in_place(Channel channel, WireSpan all, Lane::Completion done) override {
    const int64_t nbytes = all.nbytes / world_size_;
    enqueue(channel, Kind::kAllGather, "all-gather", {all.data + rank_ * nbytes, nbytes, all.owner}, all, done);
  }
  void all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) override {
    REQUIRE(dtype == Wire::kFp32 || dtype == Wire::kBf16, "this network adds floats and bf16 only");
    const Kind kind = dtype == Wire::kFp32 ? Kind::kAllReduce : Kind::kAllReduceBf16;
    enqueue(channel, kind, "all-reduce", data, data, done);
  }

 private:
  void enqueue(Channel channel, Kind kind, const char* what, const WireSpan& send, const WireSpan& receive,
               const Lane::Completion& done) {
    // The peers would mistake a later collective for the one that is missing.
    REQUIRE(!*has_failed_, "after the failure, rank %d begins another %s", rank_, what);
    const Communicator communicator = Communicator::of(channel, place_, rank_, world_size_);
    const int64_t sequence = num_of_level_[communicator.level]++;
    const bool fails = num_transfers_++ == fail_at_ && fail_ >= Fail::kTransferThrows;
    if (fails && fail_ != Fail::kTransferFaults) {
      *has_failed_ = fail_ != Fail::kTransferForgets;  // a forgotten transfer is noticed only by the lane
      const auto error = std::runtime_error("simulated failure of a transfer");
      if (fail_ == Fail::kTransferThrows) throw error;
      if (fail_ == Fail::kTransferEndsWithError) return done(std::make_exception_ptr(error));
      return;
    }
    if (network_->is_down()) throw std::runtime_error("Connection closed by peer");
    const sim::CountCalls not_the_engine(false);
    sim::launch(sim::current_stream(rank_), what,
                {{send.data, 0, 0, send.nbytes, send.data == receive.data}, {receive.data, 0, 0, receive.nbytes, true}},
                [=, network = network_, part = Part{send.data, receive.data, send.nbytes}] {
                  if (fails) throw std::runtime_error("illegal address");
                  network->meet(communicator, sequence, kind, part);
                });
    done(nullptr);
  }

  const std::shared_ptr<Network> network_;
  const int rank_, world_size_;
  const Place place_;
  const Fail fail_;
  const int64_t fail_at_;
  const HasFailed has_failed_;
  int64_t num_transfers_ = 0;
  int64_t num_of_level_[kNumChannels / 2] = {};
};

// ---- one rank's training

std::string text_of(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

uint64_t hash_of(const std::vector<float>& values) {
  uint64_t hash = 14695981039346656037U;
  const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
  for (size_t i = 0; i < values.size() * sizeof(float); ++i) hash = (hash ^ bytes[i]) * 1099511628211U;
  return hash;
}

class Rank {
 public:
  Rank(const Setup& setup, std::shared_ptr<Network> network, int rank)
      : setup_(setup),
        network_(std::move(network)),
        rank_(rank),
        transport_(std::make_shared<SimTransport>(network_, rank, setup, has_failed_)),
        engine_(
            std::make_unique<Engine>(setup.config, std::make_shared<SimDevice>(rank, setup, has_failed_), transport_)) {
    constexpr int kNumStreams = 4;
    for (int stream = 0; stream < kNumStreams; ++stream) {
      sim::set_pause(rank, stream, stream == (setup.slow_stream + rank) % kNumStreams ? 800 : 80);
    }
    if (setup.passthrough) buckets_.push_back(std::make_shared<Bucket>(777, 777));
    for (const auto& [numel, exact_numel] : setup.shapes) {
      buckets_.push_back(std::make_shared<Bucket>(numel, exact_numel));
    }
  }

  // How a bucket's job ended on the host.
  struct Outcome {
    bool ended = false;
    std::exception_ptr error;
    c10::Event event{c10::DeviceType::PrivateUse1};
    bool threw = false;  // whether submit() threw
  };

  void backward(int step, size_t b) {
    sim::launch(compute(), "backward", whole_bucket(buckets_[b]->gradients.data(), true),
                [bucket = buckets_[b], rank = rank_, step, b] { fill(bucket.get(), rank, step, b); });
  }

  std::shared_ptr<Outcome> hand_over(size_t b) {
    auto outcome = std::make_shared<Outcome>();
    auto job = make_job(*engine_, buckets_[b], b, b + 1 == buckets_.size());
    job->on_done = [outcome, rank = rank_](std::exception_ptr error) {
      // From here on this does what the future of DDP's hook does when it is completed.
      const sim::CountCalls not_the_engine(false);
      REQUIRE(!outcome->ended, "on_done was called twice");
      outcome->ended = true;
      outcome->error = std::move(error);
      if (outcome->error) return;
      try {
        outcome->event.record(sim::current_stream(rank));
      } catch (...) {  // the device has just failed: DDP's own call would fail, too
        outcome->error = std::current_exception();
      }
    };
    const c10::Stream before = compute();
    try {
      const sim::CountCalls of_the_engine(true);
      setup_.passthrough&& b == 0 ? submit_passthrough(std::move(job)) : engine_->submit(std::move(job));
    } catch (...) {
      outcome->threw = true;
      outcome->error = std::current_exception();
    }
    REQUIRE(compute() == before, "submit() changed the caller's stream");
    REQUIRE(outcome->ended || outcome->threw, "submit() did not end the job");
    return outcome;
  }

  // Enqueues the wait for a bucket and the optimizer's read of its gradients.
  void take_result(int step, size_t b, const Outcome& outcome) {
    outcome.event.block(compute());
    sim::launch(compute(), "optimizer", whole_bucket(buckets_[b]->gradients.data(), false), [this, step, b] {
      const Bucket& bucket = *buckets_[b];
      const std::string wrong = find_wrong(bucket, setup_.config, setup_.world_size, step, b);
      if (!wrong.empty() && network_->is_down()) return;  // an abandoned collective leaves undefined values
      REQUIRE(wrong.empty(), "rank %d: %s", rank_, wrong.c_str());
      hashes_.push_back(hash_of(bucket.gradients));
    });
  }

  // Runs one step without waiting for it. Before the optimizer, the compute stream waits for all buckets, or only for
  // the last. Returns the index of the bucket that ended with an error; the number of buckets if none did.
  size_t step(int step, bool waits_for_all = true) {
    std::vector<std::shared_ptr<Outcome>> outcomes;
    for (size_t b = 0; b < buckets_.size(); ++b) {
      backward(step, b);
      outcomes.push_back(hand_over(b));
      last_error_ = outcomes.back()->error;
      last_threw_ = outcomes.back()->threw;
      if (last_error_) return b;
    }
    for (size_t b = 0; b < buckets_.size(); ++b) take_result(step, b, *(waits_for_all ? outcomes[b] : outcomes.back()));
    return buckets_.size();
  }

  void synchronize() const { compute().synchronize(); }
  c10::Stream compute() const { return sim::current_stream(rank_); }
  size_t num_buckets() const { return buckets_.size(); }
  Engine& engine() const { return *engine_; }
  void destroy_engine() { engine_.reset(); }
  const std::exception_ptr& last_error() const { return last_error_; }
  bool last_threw() const { return last_threw_; }
  const std::vector<uint64_t>& hashes() const { return hashes_; }

 private:
  // Passes the first bucket through. Unless it is staged, all its work runs on the wire's lane, as the work of DDP's
  // buckets does on streams.
  void submit_passthrough(std::shared_ptr<BucketJob> job) {
    const auto& bucket = buckets_[0];
    const auto numel = static_cast<int64_t>(bucket->gradients.size());
    job->plan = no_plan();
    job->payloads.clear();
    BucketSlices slices;
    slices.origin = bucket->gradients.data();
    slices.lossy.append(slices.origin, numel, GradDtype::kFloat32);
    const auto scale = [this, slices](float factor) { engine_->device().scale_in_place(slices, factor); };
    const auto sum = [this, slices, bucket, numel](Lane::Completion done) {
      transport_->all_reduce(Channel::kScatter, {static_cast<std::byte*>(slices.origin), numel * 4, bucket},
                             Wire::kFp32, std::move(done));
    };
    const float mean = 1.0F / static_cast<float>(setup_.world_size);
    PassthroughStages stages;
    if (setup_.staged) {  // sums twice
      stages.pack = [scale, mean] { scale(mean); };
      stages.scatter = sum;
      stages.reduce = [scale, mean] { scale(mean); };
      stages.gather = sum;
      stages.unpack = [scale] { scale(1); };
    } else {
      stages.scatter = [scale, sum, mean](Lane::Completion done) {
        scale(mean);
        sum(std::move(done));
      };
    }
    engine_->submit_passthrough(std::move(job), std::move(stages));
  }

  const Setup setup_;
  const std::shared_ptr<Network> network_;
  const int rank_;
  const HasFailed has_failed_ = std::make_shared<bool>(false);
  const std::shared_ptr<SimTransport> transport_;
  std::vector<std::shared_ptr<Bucket>> buckets_;
  std::vector<uint64_t> hashes_;  // written on the compute stream
  std::exception_ptr last_error_;
  bool last_threw_ = false;
  std::unique_ptr<Engine> engine_;
};

// Calls body(rank, index, network) on a thread for each rank. When it returns, all enqueued work has ended.
void with_ranks(const Setup& setup, const std::function<void(Rank&, int, Network&)>& body) {
  auto network = std::make_shared<Network>();
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < setup.world_size; ++rank) ranks.push_back(std::make_unique<Rank>(setup, network, rank));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    threads.emplace_back([&, rank] { body(*ranks[static_cast<size_t>(rank)], rank, *network); });
  }
  for (auto& thread : threads) thread.join();
  // The buckets outlive the streams' work; the engines need not.
  for (const auto& rank : ranks) rank->destroy_engine();
  sim::reset();
}

// ---- scenes

constexpr int kNumSteps = 10;

WireConfig wire_config(Wire wire, Sum sum, int64_t num_slots, int64_t ranks_per_host = 1) {
  WireConfig config;
  config.ranks_per_host = ranks_per_host;
  config.wire = wire;
  config.sum = sum;
  config.max_chunk_nbytes = 8192;
  config.num_slots = num_slots;
  return config;
}

const Shapes kShapes = {{20011, 100}, {1, 0}, {4096, 4096}, {9001, 1}};

void check_stats(const EngineStats& stats, int num_steps, size_t num_buckets) {
  REQUIRE(stats.num_steps == num_steps && stats.num_buckets == num_steps * static_cast<int64_t>(num_buckets),
          "%ld steps of %ld buckets", static_cast<long>(stats.num_steps), static_cast<long>(stats.num_buckets));
  REQUIRE(stats.recent_exposed_ms.size() == static_cast<size_t>(num_steps) &&
              stats.recent_busy_ms.size() == static_cast<size_t>(num_steps),
          "%zu and %zu times of %d steps", stats.recent_exposed_ms.size(), stats.recent_busy_ms.size(), num_steps);
  for (size_t i = 0; i < stats.recent_busy_ms.size(); ++i) {
    const float exposed = stats.recent_exposed_ms[i], busy = stats.recent_busy_ms[i];
    REQUIRE(exposed > 0 && exposed <= busy * 1.0001F && busy < 60000, "exposed %g ms, busy %g ms", exposed, busy);
  }
}

// Returns the hashes of every rank's results.
std::vector<std::vector<uint64_t>> train_steadily(const Setup& setup) {
  std::vector<std::vector<uint64_t>> hashes(static_cast<size_t>(setup.world_size));
  with_ranks(setup, [&](Rank& rank, int index, Network&) {
    std::atomic<bool> over{false};
    std::thread reader([&] {  // reads the stats as a thread of the training script may do
      while (!over) {
        rank.engine().stats();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    for (int step = 0; step < kNumSteps; ++step) {
      const size_t failed = rank.step(step);
      REQUIRE(failed == rank.num_buckets(), "step %d: %s", step, text_of(rank.last_error()).c_str());
      if (step % 4 == 3) rank.synchronize();
    }
    rank.synchronize();
    over = true;
    reader.join();
    check_stats(rank.engine().stats(), kNumSteps, rank.num_buckets());
    hashes[static_cast<size_t>(index)] = rank.hashes();
  });
  for (const auto& of_rank : hashes) REQUIRE(of_rank == hashes[0], "ranks have different results");
  return hashes;
}

void steady() {
  int variant = 0;
  for (int world_size = 1; world_size <= 4; ++world_size) {
    for (const int64_t num_slots : {1, 2, 3}) {
      for (const auto& [wire, sum] : {std::pair{Wire::kFp32, Sum::kAuto}, std::pair{Wire::kFp32, Sum::kTwoShot},
                                      std::pair{Wire::kInt8, Sum::kTwoShot}, std::pair{Wire::kInt8, Sum::kOneShot}}) {
        Setup setup;
        setup.config = wire_config(wire, sum, num_slots);
        setup.world_size = world_size;
        setup.shapes = kShapes;
        setup.passthrough = variant % 2 == 0;
        setup.slow_stream = variant++;
        const auto hashes = train_steadily(setup);
        if (num_slots != 2) continue;
        setup.forced_sync = true;
        REQUIRE(train_steadily(setup) == hashes, "forced synchronization changes the bits");
      }
    }
  }
}

// Hosts of two and three ranks.
void two_levels() {
  int variant = 0;
  for (const int64_t ranks_per_host : {2, 3}) {
    for (const int64_t num_slots : {1, 2, 3, 4}) {
      for (const Wire wire : {Wire::kBf16, Wire::kInt8}) {
        Setup setup;
        setup.config = wire_config(wire, Sum::kAuto, num_slots, ranks_per_host);
        setup.world_size = 2 * static_cast<int>(ranks_per_host);
        setup.shapes = kShapes;
        setup.passthrough = variant % 2 == 0;
        setup.slow_stream = variant++;
        const auto hashes = train_steadily(setup);
        setup.forced_sync = true;
        REQUIRE(train_steadily(setup) == hashes, "forced synchronization changes the bits");
      }
    }
  }
}

// A bucket that is passed through in stages, each on its own lane.
void staged_passthrough() {
  for (int slow_stream = 0; slow_stream < 4; ++slow_stream) {
    Setup setup;
    setup.config = wire_config(Wire::kInt8, Sum::kTwoShot, 2);
    setup.world_size = 2;
    setup.shapes = kShapes;
    setup.passthrough = setup.staged = true;
    setup.slow_stream = slow_stream;
    train_steadily(setup);
  }
}

// Although the gradients are not ready, all work is enqueued. Times are known only afterwards.
void host_never_waits() {
  for (const auto& [wire, sum] : {std::pair{Wire::kFp32, Sum::kAuto}, std::pair{Wire::kInt8, Sum::kTwoShot}}) {
    for (const Shapes& shapes :
         {Shapes{{20011, 100}, {9001, 1}}, Shapes{{0, 0}, {9001, 1}}, Shapes{{9001, 1}, {0, 0}}}) {
      Setup setup;
      setup.config = wire_config(wire, sum, 2);
      setup.world_size = 2;
      setup.shapes = shapes;
      with_ranks(setup, [&](Rank& rank, int, Network&) {
        std::promise<void> gate;
        sim::launch(rank.compute(), "gate", {}, [opened = gate.get_future().share()] { opened.wait(); });
        for (int step = 0; step < 3; ++step) REQUIRE(rank.step(step) == rank.num_buckets(), "step %d", step);
        std::this_thread::sleep_for(std::chrono::milliseconds(5));  // gives wrongly ordered work time to run
        const EngineStats early = rank.engine().stats();
        REQUIRE(early.num_steps == 3 && early.recent_exposed_ms.empty() && early.recent_busy_ms.empty(),
                "times are known before anything was done");
        gate.set_value();
        rank.synchronize();
        check_stats(rank.engine().stats(), 3, rank.num_buckets());
      });
    }
  }
}

// A bucket ends after the bucket before it, on whichever streams they end.
void end_in_order() {
  for (const Shapes& shapes : {Shapes{{20011, 100}, {1, 0}}, Shapes{{1500, 0}, {0, 0}}}) {
    Setup setup;
    setup.config = wire_config(Wire::kInt8, Sum::kTwoShot, 2);
    setup.world_size = 2;
    setup.shapes = shapes;
    with_ranks(setup, [&](Rank& rank, int, Network&) {
      for (int step = 0; step < 3; ++step) REQUIRE(rank.step(step, /*waits_for_all=*/false) == 2, "step %d", step);
      rank.synchronize();
    });
  }
}

void traced() {
  for (const auto& [wire, sum, ranks_per_host] :
       {std::tuple{Wire::kFp32, Sum::kAuto, 1}, std::tuple{Wire::kInt8, Sum::kTwoShot, 1},
        std::tuple{Wire::kInt8, Sum::kOneShot, 1}, std::tuple{Wire::kInt8, Sum::kTwoShot, 2}}) {
    Setup setup;
    setup.config = wire_config(wire, sum, 2, ranks_per_host);
    setup.world_size = ranks_per_host == 1 ? 3 : 4;
    setup.shapes = kShapes;
    setup.passthrough = true;
    with_ranks(setup, [&](Rank& rank, int, Network&) {
      rank.step(0);
      rank.engine().start_trace();
      for (int step = 1; step < 4; ++step) rank.step(step);
      // This waits for the device; nothing before has done so.
      const std::vector<TraceSpan> spans = rank.engine().stop_trace();
      rank.step(4);
      rank.synchronize();
      REQUIRE(rank.engine().stop_trace().empty(), "stages were recorded after the trace");

      std::map<std::tuple<int64_t, std::string, int64_t>, std::vector<const TraceSpan*>> chunks;
      std::map<std::pair<int64_t, std::string>, const TraceSpan*> buckets;
      int num_exposed = 0;
      for (const TraceSpan& span : spans) {
        REQUIRE(0 <= span.begin_ms && span.begin_ms < span.end_ms, "%s of %s from %g to %g ms", stage_name(span.stage),
                span.label->name.c_str(), span.begin_ms, span.end_ms);
        if (span.stage == Stage::kExposed) {
          ++num_exposed;
        } else if (span.stage == Stage::kBucket) {
          buckets[{span.step, span.label->name}] = &span;
        } else {
          chunks[{span.step, span.label->name, span.chunk}].push_back(&span);
        }
      }
      REQUIRE(buckets.size() == 3 * rank.num_buckets(), "%zu buckets", buckets.size());
      REQUIRE(num_exposed == 3, "%d steps waited for their last bucket", num_exposed);
      for (const auto& [key, bucket] : buckets) {
        REQUIRE(chunks.count({key.first, key.second, 0}) != 0, "no stage of %s was recorded", key.second.c_str());
      }
      for (const auto& [key, stages] : chunks) {
        const auto& [step, name, chunk] = key;
        REQUIRE(1 <= step && step <= 3, "step %ld", static_cast<long>(step));
        const TraceSpan& bucket = *buckets.at({step, name});
        double before = bucket.begin_ms;
        std::vector<Stage> order;
        for (const TraceSpan* stage : stages) {
          REQUIRE(before <= stage->begin_ms, "%s of %s chunk %ld began too early", stage_name(stage->stage),
                  name.c_str(), static_cast<long>(chunk));
          before = stage->end_ms;
          order.push_back(stage->stage);
        }
        REQUIRE(before <= bucket.end_ms, "%s ended before its last stage", name.c_str());
        const bool passthrough = name == "bucket 0", two_shot = sum == Sum::kTwoShot;
        const std::vector<Stage> expected =
            passthrough ? std::vector<Stage>{Stage::kAllReduce}
            : ranks_per_host > 1
                ? std::vector<Stage>{Stage::kPack,   Stage::kLocalAllToAll, Stage::kLocalReduce,    Stage::kAllToAll,
                                     Stage::kReduce, Stage::kAllGather,     Stage::kLocalAllGather, Stage::kUnpack}
            : two_shot
                ? std::vector<Stage>{Stage::kPack, Stage::kAllToAll, Stage::kReduce, Stage::kAllGather, Stage::kUnpack}
            : sum == Sum::kOneShot ? std::vector<Stage>{Stage::kPack, Stage::kAllGather, Stage::kUnpack}
                                   : std::vector<Stage>{Stage::kPack, Stage::kAllReduce};
        REQUIRE(order == expected, "%s chunk %ld has %zu stages", name.c_str(), static_cast<long>(chunk), order.size());
      }
    });
  }
}

// A stage of rank 0 fails. Its bucket ends with an error, and every later bucket ends at once with the same error.
void failing() {
  struct Case {
    Fail fail;
    bool forced_sync;
    const char* expected;
  };
  for (const Case& c :
       {Case{Fail::kPackThrows, false, "simulated failure of a launch"},
        Case{Fail::kTransferThrows, false, "simulated failure of a transfer"},
        Case{Fail::kTransferEndsWithError, false, "simulated failure of a transfer"},
        Case{Fail::kTransferForgets, false, "did not enqueue its transfer"},
        Case{Fail::kPackFaults, true, "the pack of chunk "}, Case{Fail::kTransferFaults, true, "all-"}}) {
    for (const auto& [wire, sum, ranks_per_host] :
         {std::tuple{Wire::kFp32, Sum::kAuto, 1}, std::tuple{Wire::kInt8, Sum::kTwoShot, 1},
          std::tuple{Wire::kInt8, Sum::kOneShot, 1}, std::tuple{Wire::kInt8, Sum::kTwoShot, 2}}) {
      for (const int64_t fail_at : {0, 3, 13}) {
        Setup setup;
        setup.config = wire_config(wire, sum, 3, ranks_per_host);
        setup.world_size = 2 * ranks_per_host;
        setup.shapes = kShapes;
        setup.forced_sync = c.forced_sync;
        setup.fail = c.fail;
        setup.fail_at = fail_at;
        with_ranks(setup, [&](Rank& rank, int index, Network& network) {
          size_t failed = rank.num_buckets();
          for (int step = 0; failed == rank.num_buckets(); ++step) {
            REQUIRE(step < 1000, "nothing fails");
            try {
              failed = rank.step(step);
              if (failed == rank.num_buckets()) rank.synchronize();
            } catch (const std::exception& e) {
              REQUIRE(false, "the engine does not notice: %s", e.what());
            }
          }
          network.go_down();
          const std::string text = text_of(rank.last_error());
          REQUIRE(!rank.last_threw(), "submit() threw: %s", text.c_str());
          if (index != 0) return;
          REQUIRE(text.find(c.expected) != std::string::npos, "the error is: %s", text.c_str());
          REQUIRE(text.find("failed for bucket " + std::to_string(failed) + " (") != std::string::npos,
                  "bucket %zu failed, and the error is: %s", failed, text.c_str());
          const int64_t num_launches = sim::num_launches(index);
          for (size_t b = 0; b < rank.num_buckets(); ++b) {
            const auto outcome = rank.hand_over(b);
            REQUIRE(outcome->ended && text_of(outcome->error) == text, "after %s\na later bucket ended with: %s",
                    text.c_str(), text_of(outcome->error).c_str());
          }
          REQUIRE(sim::num_launches(index) == num_launches, "a later bucket was begun");
        });
      }
    }
  }
}

// A kernel fails on the device while the host does something else. Whichever call notices it, every later bucket ends,
// and ends with an error.
void faulted() {
  for (const auto& [wire, sum] : {std::pair{Wire::kFp32, Sum::kAuto}, std::pair{Wire::kInt8, Sum::kTwoShot}}) {
    for (int64_t fail_at = 0; fail_at < 20; ++fail_at) {
      Setup setup;
      setup.config = wire_config(wire, sum, 3);
      setup.world_size = 2;
      setup.shapes = kShapes;
      setup.fail = Fail::kPackFaults;
      setup.fail_at = fail_at;
      with_ranks(setup, [&](Rank& rank, int index, Network& network) {
        try {
          for (int step = 0; rank.step(step) == rank.num_buckets(); ++step) rank.synchronize();
        } catch (const std::exception&) {  // the test's own calls to the device may notice it first
        }
        network.go_down();
        REQUIRE(!rank.last_threw(), "submit() threw: %s", text_of(rank.last_error()).c_str());
        if (index != 0) return;
        for (size_t b = 0; b < rank.num_buckets(); ++b) {
          const auto outcome = rank.hand_over(b);
          const std::string text = text_of(outcome->error);
          REQUIRE(outcome->ended && text.find("failed for bucket") != text.npos &&
                      text.find("simulated fault") != text.npos,
                  "after the fault a bucket ends with: %s", text.c_str());
        }
      });
    }
  }
}

// Another thread stops the engine, which is then destroyed while the streams still work.
void stopped() {
  for (const auto& [wire, sum] : {std::pair{Wire::kFp32, Sum::kAuto}, std::pair{Wire::kInt8, Sum::kTwoShot}}) {
    for (int repeat = 0; repeat < 4; ++repeat) {
      Setup setup;
      setup.config = wire_config(wire, sum, 3);
      setup.world_size = 3;
      setup.shapes = kShapes;
      setup.slow_stream = repeat;
      with_ranks(setup, [&](Rank& rank, int, Network& network) {
        std::thread stopper([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(5 + 7 * repeat));
          rank.engine().stop("this scene stops it");
        });
        for (int step = 0; rank.step(step) == rank.num_buckets(); ++step) {
          if (step % 2 == 1) rank.synchronize();
        }
        stopper.join();
        network.go_down();
        const std::string text = text_of(rank.last_error());
        REQUIRE(text.find("this scene stops it") != std::string::npos || text.find("Connection closed") != text.npos,
                "the error is: %s", text.c_str());
        rank.destroy_engine();
      });
    }
  }
}

// Each call that records an event or makes a stream wait fails once, on all ranks. A bucket then either ends with an
// error or has the right result.
void calls_fail() {
  for (const auto& [num_slots, trace, ranks_per_host] :
       {std::tuple{1, false, 1}, std::tuple{3, false, 1}, std::tuple{3, true, 1}, std::tuple{3, false, 2}}) {
    int64_t num_calls = 0;
    for (int64_t failing = 0; failing <= num_calls; ++failing) {
      Setup setup;
      setup.config = wire_config(Wire::kInt8, Sum::kTwoShot, num_slots, ranks_per_host);
      setup.world_size = 2 * ranks_per_host;
      setup.shapes = {{24000, 600}, {5000, 0}};
      setup.passthrough = true;
      std::atomic<int> num_failed{0};
      with_ranks(setup, [&](Rank& rank, int index, Network&) {
        sim::fail_call(index, failing);
        if (trace) rank.engine().start_trace();
        const size_t failed = rank.step(0);
        if (failing == 0) {
          REQUIRE(failed == rank.num_buckets(), "the step fails: %s", text_of(rank.last_error()).c_str());
          if (index == 0) num_calls = sim::num_calls(index);
        }
        const std::string text = text_of(rank.last_error());
        REQUIRE(!rank.last_threw(), "call %ld: submit() threw: %s", static_cast<long>(failing), text.c_str());
        if (failed != rank.num_buckets()) {
          ++num_failed;
          REQUIRE(text.find("failed for bucket " + std::to_string(failed) + " (") != std::string::npos,
                  "call %ld: the error of bucket %zu is: %s", static_cast<long>(failing), failed, text.c_str());
        }
        rank.synchronize();
      });
      REQUIRE(num_failed == (failing == 0 ? 0 : setup.world_size), "call %ld failed, and %d ranks noticed",
              static_cast<long>(failing), num_failed.load());
    }
    REQUIRE(num_calls > 20, "only %ld calls", static_cast<long>(num_calls));
  }
}

// The driver calls on rank 0 that handing over one pass's buckets takes, after earlier passes have made events that can
// be reused. While the pass is handed over, none of its events is reached, and every event of the pass before is.
sim::Calls calls_of_a_pass(const WireConfig& config, const Shapes& shapes) {
  Setup setup;
  setup.config = config;
  setup.world_size = 2;
  setup.shapes = shapes;
  sim::Calls counted;
  with_ranks(setup, [&](Rank& rank, int index, Network&) {
    constexpr int kWarmUp = 4;
    for (int step = 0; step <= kWarmUp; ++step) {
      std::promise<void> gate;
      sim::launch(rank.compute(), "gate", {}, [opened = gate.get_future().share()] { opened.wait(); });
      const sim::Calls before = sim::calls(index);
      REQUIRE(rank.step(step) == rank.num_buckets(), "step %d: %s", step, text_of(rank.last_error()).c_str());
      const sim::Calls after = sim::calls(index);
      gate.set_value();
      rank.synchronize();
      if (index != 0 || step != kWarmUp) continue;
      for (const auto kind :
           {&sim::Calls::launched, &sim::Calls::recorded, &sim::Calls::waited, &sim::Calls::created,
            &sim::Calls::destroyed, &sim::Calls::asked, &sim::Calls::timed, &sim::Calls::waited_on_host}) {
        counted.*kind = after.*kind - before.*kind;
      }
    }
  });
  return counted;
}

// An event that is recorded only when it is needed marks the stream's work at the time of end(), not later work.
void lane_streams() {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  const auto events = std::make_shared<StreamEvents>();
  LaneStream first(guard.getNewStream(sim::device(0), 0), events),
      second(guard.getNewStream(sim::device(0), 0), events);
  const sim::CountCalls counted(true);
  const auto recorded = [] { return sim::calls(0).recorded; };
  first.wait_for(static_cast<StreamEvent&>(*first.end()));
  REQUIRE(recorded() == 0 && sim::calls(0).waited == 0, "a stream waits for itself");
  first.go_on();
  REQUIRE(recorded() == 0, "an event that nothing holds was recorded");

  const EventPtr end = first.end();
  const StampPtr stamp = first.stamp();
  REQUIRE(recorded() == 1 && dynamic_cast<StreamEvent*>(end.get()) == dynamic_cast<const StreamEvent*>(stamp.get()),
          "the end of a stream and its moment are two events");

  const EventPtr before = first.end();
  std::promise<void> gate;
  first.go_on();
  REQUIRE(recorded() == 2, "go_on() did not record the event, which is still held");
  sim::launch(first.stream(), "gate", {}, [opened = gate.get_future().share()] { opened.wait(); });
  second.wait_for(static_cast<StreamEvent&>(*before));
  second.stream().synchronize();  // does not return if the stream waits for the gate
  const EventPtr behind = second.end();
  first.wait_for(static_cast<StreamEvent&>(*behind));
  REQUIRE(recorded() == 3 && sim::calls(0).waited == 2, "%ld recordings", static_cast<long>(recorded()));

  // A wait is work, too: an end() from before the wait must not include the wait.
  const EventPtr ready = second.end(), blocked = first.end();
  second.wait_for(static_cast<StreamEvent&>(*blocked));
  REQUIRE(recorded() == 5, "an end() from before a wait is to be recorded before it");
  first.go_on();
  LaneStream third(guard.getNewStream(sim::device(0), 0), events);
  third.wait_for(static_cast<StreamEvent&>(*ready));
  third.stream().synchronize();
  gate.set_value();
  second.stream().synchronize();
  sim::reset();
}

// A thread that only asks about events has the device as its current one.
void watching_thread() {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  SimDevice device(1, Setup(), std::make_shared<bool>(false));
  std::thread watching([&] {
    device.enter_watching_thread();
    REQUIRE(guard.getDevice() == sim::device(1), "the watching thread's current device is %d",
            static_cast<int>(guard.getDevice().index()));
  });
  watching.join();
  sim::reset();
}

// A lane's later task does not delay those that wait for an earlier one. Times are known when both ends are reached.
void lane_tasks() {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  const auto events = std::make_shared<StreamEvents>();
  const auto stream = [&] { return std::make_shared<LaneStream>(guard.getNewStream(sim::device(0), 0), events); };
  const auto of_first = stream(), of_second = stream();
  StreamLane first(of_first), second(of_second);
  const sim::CountCalls counted(true);
  const EventPtr end = first.run(nullptr, [] {});
  std::promise<void> gate;
  first.run(nullptr, [opened = gate.get_future().share()] {
    sim::launch(sim::current_stream(0), "gate", {}, [opened] { opened.wait(); });
  });
  REQUIRE(sim::calls(0).recorded == 1, "the next task did not record the end of the task before, which is still held");
  second.run(end, [] {});
  of_second->stream().synchronize();  // does not return if the lane waits for the gate

  const StreamEventPtr early = events->now(of_second->stream()), late = events->now(of_first->stream());
  REQUIRE(early->is_recorded() && late->is_recorded(), "now() did not record its event");
  std::thread opener([&gate] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    gate.set_value();
  });
  const double ms = early->ms_since(*late);
  opener.join();
  REQUIRE(ms < 0, "%g ms from a later moment to an earlier one", ms);
  sim::launch(of_first->stream(), "work", {}, [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  const StreamEventPtr last = events->now(of_first->stream());
  REQUIRE(last->ms_since(*early) > 0, "no time has passed");
  sim::reset();
}

void print_calls(const char* what, const sim::Calls& calls, double per) {
  const auto each = [per](int64_t count) { return static_cast<double>(count) / per; };
  std::printf(
      "stream_stress: calls: %s: %.1f (launched %.1f, recorded %.1f, waited %.1f, created %.1f, destroyed %.1f, "
      "asked %.1f, timed %.1f, waited on host %.1f)\n",
      what, each(calls.total()), each(calls.launched), each(calls.recorded), each(calls.waited), each(calls.created),
      each(calls.destroyed), each(calls.asked), each(calls.timed), each(calls.waited_on_host));
}

// The number of driver calls for each bucket, as docs/gpu.md states it. It does not include the calls of c10's
// future and the call that asks whether the step is being captured.
void calls() {
  constexpr int kNumBuckets = 8;
  struct Case {
    const char* name;
    Wire wire;
    Sum sum;
    double most, most_if_small;
  };
  for (const Case& c :
       {Case{"int8 two-shot", Wire::kInt8, Sum::kTwoShot, 13, 9},
        Case{"int8 one-shot", Wire::kInt8, Sum::kOneShot, 12, 7}, Case{"bf16 direct", Wire::kBf16, Sum::kDirect, 12, 7},
        Case{"fp32 exact", Wire::kFp32, Sum::kExact, 10, 6}}) {
    const WireConfig config = wire_config(c.wire, c.sum, 4);
    for (const auto& [size, numel, most] :
         {std::tuple{"", 3000, c.most}, std::tuple{" small", 1500, c.most_if_small}}) {
      const std::string name = std::string(c.name) + size;
      const sim::Calls pass = calls_of_a_pass(config, Shapes(kNumBuckets, {numel, 0}));
      print_calls(name.c_str(), pass, kNumBuckets);
      REQUIRE(static_cast<double>(pass.total()) / kNumBuckets <= most, "more than %g calls a bucket: %s", most,
              name.c_str());
    }
  }
  const WireConfig config = wire_config(Wire::kInt8, Sum::kTwoShot, 4);
  const auto of_bucket = [&config](int64_t numel) {
    const int64_t num_chunks = plan_bucket(config, 2, GradDtype::kFloat32, {0, {numel}, numel}).num_chunks();
    return std::pair{calls_of_a_pass(config, {{numel, 0}}), num_chunks};
  };
  const auto [shorter, num_shorter] = of_bucket(60000);
  const auto [longer, num_longer] = of_bucket(120000);
  const double per_chunk = static_cast<double>(longer.total() - shorter.total()) / (num_longer - num_shorter);
  std::printf("stream_stress: calls: a further chunk of int8 two-shot: %.1f\n", per_chunk);
  REQUIRE(per_chunk <= 13, "%g calls a chunk", per_chunk);
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, void (*)()> scenes = {{"steady", steady},
                                                    {"host_never_waits", host_never_waits},
                                                    {"end_in_order", end_in_order},
                                                    {"traced", traced},
                                                    {"failing", failing},
                                                    {"stopped", stopped},
                                                    {"calls_fail", calls_fail},
                                                    {"faulted", faulted},
                                                    {"two_levels", two_levels},
                                                    {"staged_passthrough", staged_passthrough},
                                                    {"calls", calls},
                                                    {"lane_streams", lane_streams},
                                                    {"lane_tasks", lane_tasks},
                                                    {"watching_thread", watching_thread}};
  std::string wanted;
  uint64_t seed = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--seed" && i + 1 < argc) {
      seed = std::stoull(argv[++i]);
    } else {
      wanted = argv[i];
    }
  }
  REQUIRE(wanted.empty() || scenes.count(wanted) != 0, "there is no scene %s", wanted.c_str());
  sim::set_seed(seed);
  for (const auto& [name, scene] : scenes) {
    if (wanted.empty() || name == wanted) run_scene("stream_stress", name.c_str(), seed, scene);
  }
  return 0;
}
