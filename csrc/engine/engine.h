// The engine: takes buckets in the order in which the backward pass fills them and has them summed across ranks.
//
//   pack lane ──► scatter lane ──► reduce lane ──► gather lane ──► unpack lane        two-shot
//   pack lane ──► scatter lane ───────────────────────────────────► unpack lane       all-reduce (exact, direct)
//   pack lane ──► scatter lane (all-gather) ──────────────────────► unpack lane, which sums       one-shot
//
// Where hosts have several ranks a two-shot may have two levels: within a host and then between hosts, so that less of
// it crosses the network. Rank l of a host sums the l-th of its ranks' parts, and then, with the ranks l of the other
// hosts, one over all hosts of each of the pieces that this part is made of:
//
//   pack ──► scatter (local) ──► local reduce ──► cross scatter ──► reduce ──► cross gather ──► gather (local) ──►
//   unpack
//
// A bucket travels as chunks through a small ring of workspaces. Every lane takes the chunks of all buckets in the same
// order, so the order of collectives on each channel is a matter of the buckets alone and never of timing; and while
// chunk k is on the wire, chunk k+1, of this bucket or the next, is packed. Where the lanes are streams, chunk k+1's
// all-to-all is enqueued before chunk k's all-gather, so the wire has work while chunk k is reduced; a bucket of one
// chunk has nothing to put there, and is reduced on the wire's own stream. Nothing here waits: submit() returns at
// once, and on_done is called from the unpack lane. No torch in here.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "devices/device.h"
#include "engine/board.h"
#include "engine/plan.h"
#include "engine/trace.h"
#include "transport/transport.h"

namespace fusedcomm {

// The elements that travel in one of a bucket's layouts, and how they are rounded.
struct Payload {
  BucketStreams streams;
  // What unpack writes to, if it needs tables of its own: of the plan's layout, where pack's are of its host layout.
  std::optional<BucketStreams> unpacked;
  Encoding pack, local_reduce, reduce;
};

// One bucket under way.
struct BucketJob {
  BucketPlan plan;
  // Keeps the gradients alive as long as the job: after a failure or a stop, on_done comes before the transport has let
  // go of memory that it was given.
  std::shared_ptr<void> owner;
  std::vector<Payload> payloads;  // of plan.layouts; in_place: everything is in the first one's lossy stream
  std::shared_ptr<const BucketLabel> label;
  bool is_last = false;  // of this backward pass
  bool counted = true;   // in the engine's stats; not if it serves another bucket
  int64_t grad_nbytes = 0;

  // Called on the pack lane before the first chunk is packed; may be empty.
  std::function<void()> before_pack;
  // Called on the lane of the encoder that error feedback begins with (pack; on two levels the local reduce), after the
  // last chunk; may be empty.
  std::function<void()> after_first_encoder;
  // Called for each chunk in which pack met non-finite elements, while the gradients are still there; may be empty.
  std::function<void(const BucketJob& job, int64_t chunk)> on_nonfinite;
  // Called exactly once, with an error or null.
  std::function<void(std::exception_ptr)> on_done;

  StampPtr submitted;
  int64_t step = 0;
  int64_t number = 0;         // on the engine's board
  int64_t num_nonfinite = 0;  // written on the pack lane, read in on_done
};

// What a bucket that the codec cannot carry does at each stage; empty ones are left out.
struct ForeignStages {
  Lane::Task pack;
  Lane::Transfer scatter;
  Lane::Task reduce;
  Lane::Transfer gather;
  Lane::Task unpack;
};

// The first error of an engine, which every later job gets. Shared with transfers, which may outlive the engine.
class FailureLatch {
 public:
  // From the text of a failure to what can be said of the other ranks; may take some seconds, and must end by itself.
  using Explain = std::function<std::string(const std::string& failure)>;

  FailureLatch(int rank, int world_size) : rank_(rank), world_size_(world_size) {}
  // Called for the first failure alone, on the thread that met it, without the latch's lock; but if a bucket fails
  // while it is handed over, that thread holds the engine's submit_mutex_. So what explains must wait for nothing that
  // takes that one: the watch takes its own locks and the board's, and what ends its wait, GradHook::stop(), takes
  // none.
  void explain_with(Explain explain);
  // Waits while the first failure is being explained: what it says goes to every job.
  std::exception_ptr get() const;
  // Keeps `error` if it is the first.
  void set(std::exception_ptr error);
  // Whether the first is a failure, and not what set() was given.
  bool has_failed() const;
  // `cause` with the rank, the stage, the chunk and the bucket in its text; also kept if it is the first.
  std::exception_ptr fail(const BucketJob& job, const std::string& stage, int64_t chunk, std::exception_ptr cause);

 private:
  const int rank_, world_size_;
  mutable std::mutex mutex_;
  mutable std::condition_variable explained_;
  Explain explain_;
  bool explaining_ = false, failed_ = false;
  std::exception_ptr first_;
};

// Sums since the engine was made; a step ends with a bucket that is_last. Times follow when the device has got there.
struct EngineStats {
  int64_t num_steps = 0;
  int64_t num_buckets = 0;
  int64_t grad_nbytes = 0;
  int64_t sent_nbytes = 0;
  int64_t sent_between_hosts_nbytes = 0;  // on one level every rank counts as a host
  int64_t num_nonfinite = 0;
  double busy_ms = 0;  // time during which at least one bucket was under way
  // Of the last steps, unordered. Exposed: from the last bucket's hand-over to its completion.
  std::vector<float> recent_exposed_ms;
  std::vector<float> recent_busy_ms;
};

class Engine {
 public:
  // Allocates the workspaces, once; the chunk bounds them, whatever buckets come.
  Engine(const WireConfig& config, std::shared_ptr<Device> device, std::shared_ptr<Transport> transport);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Same order on every rank. After a failure every further job fails at once with the first error.
  void submit(std::shared_ptr<BucketJob> job);

  // For what the codec cannot carry (sparse, float64): the caller's own stages on the same lanes, in the order of the
  // buckets. Of the job only owner, label, is_last and on_done are used.
  void submit_foreign(std::shared_ptr<BucketJob> job, ForeignStages stages);

  // Fails what is under way with `reason` and ends the lanes. Idempotent.
  void stop(const std::string& reason);
  bool has_failed() const { return failure_->has_failed(); }
  // After stop(), for an engine that is kept for what it has counted.
  void free_workspaces();

  EngineStats stats();
  void start_trace() { tracer_->start(device_->stamp()); }
  std::vector<TraceSpan> stop_trace() { return tracer_->stop(); }
  int64_t scratch_nbytes() const {
    return static_cast<int64_t>(slots_.size()) * (one_shot_ ? world_size() : 2) * slot_nbytes_;
  }
  const std::shared_ptr<Board>& board() const { return board_; }
  // See FailureLatch.
  void explain_failures_with(FailureLatch::Explain explain) { failure_->explain_with(std::move(explain)); }
  const WireConfig& config() const { return config_; }
  Device& device() const { return *device_; }
  const std::shared_ptr<Device>& shared_device() const { return device_; }
  int world_size() const { return transport_->world_size(); }
  int rank() const { return transport_->rank(); }

 private:
  // The workspace of one chunk. Two buffers serve all stages, since each reads from one what the stage before wrote
  // there, and writes to the other, where all is dead.
  struct Slot {
    // Packed parts, encoded sums; on two levels every owner's encoded mean. None where all sums are one-shot.
    std::shared_ptr<std::byte> outgoing;
    std::shared_ptr<std::byte> incoming;  // parts to sum, every owner's encoded mean; in a one-shot all messages
    EventPtr free;                        // the last use has ended
  };

  // A chunk on its way, of which so many legs have been ordered. A leg ends with codec work, which the next one's
  // collective waits for; in between, the wire has other chunks' legs to carry:
  //
  //   one level    pack, all-to-all, reduce | all-gather, unpack            all-reduce: pack, all-reduce | unpack
  //                                                                         one-shot: pack, all-gather | unpack
  //   two levels   pack, local all-to-all, local reduce | all-to-all, reduce | all-gather, local all-gather, unpack
  struct Underway {
    Slot* slot;
    int64_t chunk;
    EventPtr event;
    int num_legs = 1;
  };

  // Throws std::length_error.
  void check_fits_workspaces(const BucketPlan& plan) const;
  // What the calling thread has enqueued comes before; false if the job has been ended with an error.
  bool begin(const std::shared_ptr<BucketJob>& job);
  EventPtr submit_in_place(const std::shared_ptr<BucketJob>& job);
  Underway submit_first_leg(const std::shared_ptr<BucketJob>& job, int64_t chunk);
  void submit_next_leg(const std::shared_ptr<BucketJob>& job, Underway* underway);
  // From a slot's outgoing buffer to its incoming one.
  EventPtr all_to_all(Lane& lane, const std::shared_ptr<BucketJob>& job, Stage stage, Channel channel, int64_t nbytes,
                      Underway* underway);
  // The same way; `back`: the other way.
  EventPtr all_gather(Lane& lane, const std::shared_ptr<BucketJob>& job, Stage stage, Channel channel,
                      int64_t part_nbytes, Underway* underway, bool back);
  // The lane for a sum of the bucket's: `own`, or the wire's if nothing else goes over it between the collectives
  // before and after the sum. There these need no events to wait for each other.
  Lane& sum_lane(const BucketJob& job, Lane& own) const;
  // The stages of a chunk, one payload after another. `out` and `parts` are messages.
  void pack(BucketJob& job, int64_t chunk, std::byte* out);
  void local_reduce(const BucketJob& job, int64_t chunk, const std::byte* parts, std::byte* out);
  void reduce(const BucketJob& job, int64_t chunk, const std::byte* parts, std::byte* out);
  void unpack(const BucketJob& job, int64_t chunk, const std::byte* parts);
  void finish(const std::shared_ptr<BucketJob>& job, std::exception_ptr error);
  // Of a bucket without an error: the statistics.
  void account(const BucketJob& job, const StampPtr& done);
  // Of passes that are through. One question to the device for each, not one for each bucket.
  void take_times();
  void take_pass(size_t num_buckets);

  // A task or transfer whose error goes through the failure latch and whose time through the tracer.
  Lane::Task stage(const std::shared_ptr<BucketJob>& job, Stage stage, int64_t chunk, Lane::Task body);
  Lane::Transfer wire_stage(const std::shared_ptr<BucketJob>& job, Stage stage, int64_t chunk, Lane::Transfer body);

  std::vector<Lane*> lanes() const;  // upstream first

  const WireConfig config_;
  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Transport> transport_;
  const Place place_;
  const std::shared_ptr<FailureLatch> failure_;
  const std::shared_ptr<Tracer> tracer_ = std::make_shared<Tracer>();
  const std::shared_ptr<Board> board_ = std::make_shared<Board>();

  // A bucket whose result has been ordered; on an accelerator it may be there only later.
  struct Interval {
    StampPtr submitted, done;
    bool is_last;
  };

  // Order of submission, slots_, next_slot_ and submitted_steps_. It is held while collectives are enqueued, and NCCL's
  // then wait for the GIL: torch's flight recorder notes the Python frames of each, unless TORCH_FR_BUFFER_SIZE=0 turns
  // it off. So nobody may wait for this mutex, or for one that is held while waiting for it, with the GIL in hand:
  // bindings let go of the GIL first. Under it one may wait for the GIL, for what a failure is explained with (see
  // FailureLatch) and for mutex_, the board's, the tracer's, a lane's and the latch's own mutexes, under none of which
  // anybody waits for the GIL or for this one.
  std::mutex submit_mutex_;
  std::mutex mutex_;  // what follows, down to num_timed_steps_
  EngineStats stats_;
  std::deque<Interval> untimed_;
  StampPtr last_done_;
  int64_t num_timed_steps_ = 0;

  int64_t submitted_steps_ = 0;

  int64_t slot_nbytes_ = 0;  // of a chunk
  bool one_shot_ = false;    // sums of what is packed
  std::vector<Slot> slots_;
  size_t next_slot_ = 0;

  // Last, so that they are gone before what their tasks use.
  std::unique_ptr<Lane> pack_lane_, scatter_lane_, reduce_lane_, gather_lane_, unpack_lane_;
  std::unique_ptr<Lane> local_reduce_lane_, cross_scatter_lane_, cross_gather_lane_;  // null on one level
};

}  // namespace fusedcomm
