// The engine sums buckets across ranks, in the order in which the backward pass fills them.
//
// A bucket is cut into chunks, which use a small ring of workspaces. Each chunk goes through the steps of its bucket's
// sum (sums.h) on these lanes:
//
//   pack lane ──► scatter lane ──► reduce lane ──► gather lane ──► unpack lane        two-shot
//   pack lane ──► scatter lane ───────────────────────────────────► unpack lane       all-reduce (exact, direct)
//   pack lane ──► scatter lane (all-gather) ──────────────────────► unpack lane, which sums       one-shot
//   pack ──► scatter (local) ──► local reduce ──► cross scatter ──► reduce ──► cross gather ──► local gather ──►
//   unpack                                                                 two-shot on two levels
//
// Every lane takes the chunks of all buckets in the same order. The order of collectives on each channel therefore
// depends on the buckets alone, never on timing. While chunk k is on the wire, chunk k+1, of this bucket or the next,
// is packed. Where the lanes are streams, chunk k+1's all-to-all is enqueued before chunk k's all-gather, so the wire
// has work while chunk k is reduced. A bucket of one chunk has no such work, and is reduced on the wire's own stream.
// All stages of a small bucket run there, because that saves the host more time than it costs the wire. Sums on two
// levels have three wires, each with a stream and communicators of its own: while bucket k is between hosts, bucket k+1
// is summed within them and bucket k−1 spreads there. Nothing here waits: submit() returns at once, and on_done is
// called from the lane of unpack. This layer does not use torch.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "devices/device.h"
#include "engine/board.h"
#include "engine/config.h"
#include "engine/failure_latch.h"
#include "engine/job.h"
#include "engine/stats.h"
#include "engine/trace.h"
#include "transport/transport.h"

namespace fusedcomm {

// The number of LaneRole's enumerators.
inline constexpr size_t kNumLaneRoles = 9;

class Engine {
 public:
  // Allocates the workspaces once; the configuration's chunk size bounds them for any bucket. Throws
  // std::invalid_argument if the configuration is not possible or has other hosts than the transport.
  Engine(const WireConfig& config, std::shared_ptr<Device> device, std::shared_ptr<Transport> transport);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Enqueues a job. Every rank must submit the same jobs in the same order. After a failure every further job fails at
  // once with the first error.
  void submit(std::shared_ptr<BucketJob> job);

  // Enqueues a bucket that the codec cannot carry (sparse, float64): the caller's own stages run on the same lanes, in
  // the order of the buckets. Uses no other plan of the job than its workspace and whether it gathers.
  void submit_passthrough(std::shared_ptr<BucketJob> job, PassthroughStages stages);

  // For jobs that keep messages, of an engine that has stopped; on the calling thread. The first packs the chunks that
  // pack has not reached. The second unpacks the kept means, which somebody has filled in.
  void pack_rest(BucketJob& job);
  void unpack_kept(BucketJob& job);

  // Whether all stages of this job run on the wire's lane. Its plan and grad_nbytes must be known.
  bool is_on_wire(const BucketJob& job) const;

  // Fails all jobs under way with `reason` and ends the lanes. Idempotent.
  void stop(const std::string& reason);
  // Call it after stop(): waits for a thread that is enqueuing a job's work, at most so long. No thread enqueues after
  // that, but one for which the limit was too short.
  void wait_for_callers(std::chrono::milliseconds limit);
  bool has_failed() const { return failure_->has_failed(); }
  // Whether it takes no more jobs: it was stopped, or a job has failed.
  bool has_ended() const { return failure_->get() != nullptr; }
  // Only with lanes that enqueue: the ends of what all of them, and the calling thread's stream, have been given so
  // far.
  std::vector<StampPtr> ends();
  // Call it after stop(), for an engine that is kept only for its statistics.
  void free_workspaces();

  EngineStats stats() { return stats_.get(); }
  void begin_stats_with(const EngineStats& before) { stats_.begin_with(before); }
  void start_trace() { tracer_->start(device_->stamp()); }
  std::vector<TraceSpan> stop_trace() { return tracer_->stop(); }
  // Bytes of all workspaces.
  int64_t scratch_nbytes() const {
    return static_cast<int64_t>(slots_.size()) * (workspace_.outgoing_nbytes + workspace_.incoming_nbytes);
  }
  const std::shared_ptr<Board>& board() const { return board_; }
  // See FailureLatch::explain_with().
  void explain_failures_with(FailureLatch::Explain explain) { failure_->explain_with(std::move(explain)); }
  const WireConfig& config() const { return config_; }
  Device& device() const { return *device_; }
  const std::shared_ptr<Device>& shared_device() const { return device_; }
  int world_size() const { return transport_->world_size(); }
  int rank() const { return transport_->rank(); }

 private:
  // The workspace of one chunk; a buffer that no sum of the configuration needs is null.
  struct Slot {
    std::shared_ptr<std::byte> outgoing;
    std::shared_ptr<std::byte> incoming;
    EventPtr free;  // completes when the last use has ended
  };

  // A chunk under way.
  struct Underway {
    Slot* slot;  // null if its bucket is summed in place
    int64_t chunk;
    EventPtr event;          // the end of the step before
    size_t num_ordered = 0;  // steps enqueued so far
  };

  // Throws std::length_error if the plan needs larger buffers than a slot has.
  void check_fits_workspaces(const BucketPlan& plan) const;
  // Numbers the job, and makes the pack lane wait for what the calling thread has enqueued. Returns false if the job
  // has ended with an error.
  bool begin(const std::shared_ptr<BucketJob>& job);
  // Enqueues a job that has begun, in all its stages.
  void submit_stages(const std::shared_ptr<BucketJob>& job);
  // Enqueues the steps of all chunks. Returns the end of the last one; null if there is no chunk.
  EventPtr submit_chunks(const std::shared_ptr<BucketJob>& job);
  Underway take_slot(const BucketPlan& plan, int64_t chunk);
  void submit_leg(const std::shared_ptr<BucketJob>& job, Underway* underway);
  EventPtr submit_step(const std::shared_ptr<BucketJob>& job, const Step& step, Underway* underway);
  // Lets the job end on its lane of unpack, after `end` and after the job before, whose lane may be another one.
  void submit_end(const std::shared_ptr<BucketJob>& job, const EventPtr& end);
  // The lane that a job uses for a role.
  Lane& lane_of(const BucketJob& job, LaneRole role) const;
  // The memory that a step reads or writes; empty for gradients that are not summed in place.
  WireSpan span(const std::shared_ptr<BucketJob>& job, const Underway& underway, Buffer buffer, int64_t nbytes) const;
  void start_collective(const Step& step, Wire dtype, const WireSpan& from, const WireSpan& to, Lane::Completion done);
  // Runs a step of the codec for one chunk, one payload after another. `from` and `to` are messages.
  void run_codec(BucketJob& job, const Step& step, int64_t chunk, const std::byte* from, std::byte* to);
  void scale(BucketJob& job);
  void pack(BucketJob& job, int64_t chunk, std::byte* out);
  void local_reduce(const BucketJob& job, int64_t chunk, const std::byte* parts, std::byte* out);
  void reduce(const BucketJob& job, int64_t chunk, const std::byte* parts, std::byte* out);
  void unpack(const BucketJob& job, int64_t chunk, const std::byte* parts, int64_t num_messages);
  void finish(const std::shared_ptr<BucketJob>& job, std::exception_ptr error);
  // Adds a bucket that ended without an error to the trace and the statistics.
  void account(const BucketJob& job, const StampPtr& done);

  // Wraps a task or transfer: reports errors to the failure latch, progress to the board and times to the tracer.
  Lane::Task stage(const std::shared_ptr<BucketJob>& job, Stage stage, int64_t chunk, Lane::Task body);
  Lane::Transfer wire_stage(const std::shared_ptr<BucketJob>& job, Stage stage, int64_t chunk, Lane::Transfer body);

  Lane& lane(LaneRole role) const { return *lanes_[static_cast<size_t>(role)]; }

  const WireConfig config_;
  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Transport> transport_;
  const Place place_;
  const std::shared_ptr<FailureLatch> failure_;
  const std::shared_ptr<Tracer> tracer_ = std::make_shared<Tracer>();
  const std::shared_ptr<Board> board_ = std::make_shared<Board>();
  // The state that stages under way use, which may outlive the engine.
  struct Observers {
    std::shared_ptr<FailureLatch> failure;
    std::shared_ptr<Device> device;
    std::shared_ptr<Tracer> tracer;
    std::shared_ptr<Board> board;
  };
  const std::shared_ptr<const Observers> observers_;

  // Guards the order of submission, slots_, next_slot_, ended_ and submitted_steps_. It is held while collectives are
  // enqueued, and enqueuing an NCCL collective waits for the GIL: torch's flight recorder notes the Python frames of
  // each, unless TORCH_FR_BUFFER_SIZE=0 turns it off. A thread that holds the GIL must therefore not wait for this
  // mutex, nor for a mutex that is held while waiting for this one: bindings release the GIL first. A thread that holds
  // it may wait for the GIL, for the explanation of a failure (see FailureLatch), and for the mutexes of the stats, the
  // board, the tracer, a lane and the latch. No thread that holds one of these mutexes waits for the GIL or for this
  // mutex.
  std::timed_mutex submit_mutex_;
  int64_t submitted_steps_ = 0;

  StatsKeeper stats_;
  Workspace workspace_;  // the buffers of each slot
  std::vector<Slot> slots_;
  size_t next_slot_ = 0;
  EventPtr ended_;  // the end of the last job on a device that enqueues; else null

  // Indexed by role. Null if the role belongs to sums on two levels and the engine's have one. They are the last
  // member, so that they are destroyed before anything that their tasks use.
  std::array<std::unique_ptr<Lane>, kNumLaneRoles> lanes_;
};

}  // namespace fusedcomm
