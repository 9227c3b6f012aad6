#include "engine/engine.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "engine/stage_scope.h"

namespace fusedcomm {
namespace {

// In the order in which a bucket passes through the lanes.
constexpr std::array<LaneRole, kNumLaneRoles> kRoles = {
    LaneRole::kPack,        LaneRole::kScatter, LaneRole::kLocalReduce, LaneRole::kCrossScatter, LaneRole::kReduce,
    LaneRole::kCrossGather, LaneRole::kGather,  LaneRole::kLocalGather, LaneRole::kUnpack};

bool is_of_two_levels(LaneRole role) { return role >= LaneRole::kLocalReduce; }

}  // namespace

Engine::Engine(const WireConfig& config, std::shared_ptr<Device> device, std::shared_ptr<Transport> transport)
    : config_(config),
      device_(std::move(device)),
      transport_(std::move(transport)),
      place_(transport_->place()),
      failure_(std::make_shared<FailureLatch>(transport_->rank(), transport_->world_size())),
      observers_(std::make_shared<const Observers>(Observers{failure_, device_, tracer_, board_})) {
  check_config(config_);
  if (config_.ranks_per_host != place_.ranks_per_host) {
    throw std::invalid_argument("ranks_per_host must be the same for both: the configuration has " +
                                std::to_string(config_.ranks_per_host) + " ranks on a host, the transport has " +
                                std::to_string(place_.ranks_per_host));
  }
  workspace_ = workspace_of(config_, world_size());
  slots_.resize(static_cast<size_t>(config_.num_slots));
  for (Slot& slot : slots_) {
    if (workspace_.outgoing_nbytes != 0) slot.outgoing = device_->allocate(workspace_.outgoing_nbytes);
    if (workspace_.incoming_nbytes != 0) slot.incoming = device_->allocate(workspace_.incoming_nbytes);
  }
  for (const LaneRole role : kRoles) {
    if (is_of_two_levels(role) && !place_.on_two_levels()) continue;
    lanes_[static_cast<size_t>(role)] = device_->make_lane(role);
  }
}

Engine::~Engine() { stop("its engine was destroyed"); }

void Engine::stop(const std::string& reason) {
  const auto error = std::make_exception_ptr(std::runtime_error(
      "fusedcomm: rank " + std::to_string(transport_->rank()) + ": a bucket was given up because " + reason));
  failure_->set(error);
  // Stop the lanes in this order: an earlier lane passes its errors on to later ones, and jobs end on the unpack lane.
  for (const LaneRole role : kRoles) {
    if (const auto& lane = lanes_[static_cast<size_t>(role)]) lane->stop(error);
  }
}

void Engine::wait_for_callers(std::chrono::milliseconds limit) {
  const std::unique_lock<std::timed_mutex> lock(submit_mutex_, limit);
}

std::vector<StampPtr> Engine::ends() {
  std::lock_guard<std::timed_mutex> lock(submit_mutex_);
  std::vector<StampPtr> ends = {device_->stamp()};
  for (const auto& lane : lanes_) {
    if (lane) lane->finally(nullptr, [&](std::exception_ptr) { ends.push_back(device_->stamp()); });
  }
  return ends;
}

void Engine::free_workspaces() {
  std::lock_guard<std::timed_mutex> lock(submit_mutex_);
  slots_.clear();
}

void Engine::check_fits_workspaces(const BucketPlan& plan) const {
  const Workspace& needed = plan.workspace;
  if (needed.outgoing_nbytes > workspace_.outgoing_nbytes || needed.incoming_nbytes > workspace_.incoming_nbytes) {
    throw std::length_error("a chunk needs " + std::to_string(needed.outgoing_nbytes) + " outgoing and " +
                            std::to_string(needed.incoming_nbytes) + " incoming bytes for sum='" + sum_name(plan.sum) +
                            "', and a workspace of this engine has " + std::to_string(workspace_.outgoing_nbytes) +
                            " outgoing and " + std::to_string(workspace_.incoming_nbytes) + " incoming bytes");
  }
}

bool Engine::begin(const std::shared_ptr<BucketJob>& job) {
  job->step = submitted_steps_;
  if (job->is_last) ++submitted_steps_;
  // The last bucket waits for all before it. Gathers of parameters have no last one in the forward pass.
  transport_->supervise(job->is_last || job->plan->gathers);
  job->number = board_->hand_over(job->label, job->step, job->is_last, job->num_chunks());
  std::exception_ptr error = failure_->get();
  if (!error) {
    try {
      check_fits_workspaces(*job->plan);
    } catch (...) {
      error = failure_->fail(*job, "planning", 0, std::current_exception());
    }
  }
  if (!error) {
    try {
      Moment handed = device_->moment();
      job->submitted = std::move(handed.stamp);
      lane_of(*job, LaneRole::kPack).wait(std::move(handed.event));
    } catch (...) {
      error = failure_->fail(*job, "hand-over", 0, std::current_exception());
    }
  }
  if (error) finish(job, error);
  return !error;
}

void Engine::submit(std::shared_ptr<BucketJob> job) {
  std::lock_guard<std::timed_mutex> lock(submit_mutex_);
  if (!begin(job)) return;
  if (!is_on_wire(*job)) return submit_stages(job);
  // This switches to the wire's stream once for all stages.
  lane(LaneRole::kScatter).finally(nullptr, [this, &job](std::exception_ptr) { submit_stages(job); });
}

void Engine::submit_stages(const std::shared_ptr<BucketJob>& job) {
  EventPtr end = submit_chunks(job);
  // There is nothing to sum: the job ends when the caller's stream gets here, so its times are on that stream.
  if (!end) end = lane(LaneRole::kPack).run(nullptr, [] {});
  for (const auto& decorator : job->decorators) {
    if (!decorator->has_after_unpack()) continue;
    Lane::Task after_unpack = stage(job, Stage::kUnpack, 0, [&own = *decorator] { own.after_unpack(); });
    end = lane_of(*job, LaneRole::kUnpack).run(std::move(end), std::move(after_unpack));
  }
  submit_end(job, end);
}

void Engine::submit_end(const std::shared_ptr<BucketJob>& job, const EventPtr& end) {
  Lane& last = lane_of(*job, LaneRole::kUnpack);
  std::exception_ptr failed;
  try {
    if (ended_) last.wait(ended_);
  } catch (...) {
    failed = std::current_exception();
  }
  last.finally(end, [this, job, failed](std::exception_ptr error) { finish(job, failed ? failed : std::move(error)); });
}

EventPtr Engine::submit_chunks(const std::shared_ptr<BucketJob>& job) {
  const int64_t num_chunks = job->plan->num_chunks();
  const size_t num_steps = job->plan->steps->size();
  EventPtr end;
  std::deque<Underway> underway;
  for (int64_t chunk = 0; chunk < num_chunks || !underway.empty(); ++chunk) {
    // Enqueue the first leg of a new chunk, then the next leg of every older chunk, the newest of these first.
    const size_t num_older = underway.size();
    if (chunk < num_chunks) {
      underway.push_back(take_slot(*job->plan, chunk));
      submit_leg(job, &underway.back());
    }
    for (size_t i = num_older; i-- > 0;) submit_leg(job, &underway[i]);
    // If all workspaces are taken, the oldest chunk must have all its steps enqueued before the next chunk begins.
    const bool is_full = underway.size() == slots_.size();
    while (is_full && underway.front().num_ordered < num_steps) submit_leg(job, &underway.front());
    while (!underway.empty() && underway.front().num_ordered == num_steps) {
      end = underway.front().event;
      underway.pop_front();
    }
  }
  return end;
}

void Engine::submit_passthrough(std::shared_ptr<BucketJob> job, PassthroughStages stages) {
  std::lock_guard<std::timed_mutex> lock(submit_mutex_);
  if (!begin(job)) return;
  // Without pack the sum waits for what the pack lane waits for: the gradients.
  EventPtr end = stages.pack ? nullptr : lane(LaneRole::kPack).run(nullptr, [] {});
  // On two levels earlier buckets use streams that these stages do not. A watchdog sees only the last bucket.
  if (job->is_last && ended_) lane(LaneRole::kScatter).wait(ended_);
  const auto run = [&](LaneRole role, Stage of, Lane::Task body) {
    if (body) end = lane(role).run(std::move(end), stage(job, of, 0, std::move(body)));
  };
  const auto start = [&](LaneRole role, Stage of, Lane::Transfer body) {
    if (body) end = lane(role).start(std::move(end), wire_stage(job, of, 0, std::move(body)));
  };
  run(LaneRole::kPack, Stage::kPack, std::move(stages.pack));
  start(LaneRole::kScatter, Stage::kAllReduce, std::move(stages.scatter));
  run(LaneRole::kReduce, Stage::kReduce, std::move(stages.reduce));
  start(LaneRole::kGather, Stage::kAllGather, std::move(stages.gather));
  run(LaneRole::kUnpack, Stage::kUnpack, std::move(stages.unpack));
  submit_end(job, end);
}

Engine::Underway Engine::take_slot(const BucketPlan& plan, int64_t chunk) {
  if (plan.in_place) return {nullptr, chunk, nullptr};
  Slot& slot = slots_[next_slot_++ % slots_.size()];
  return {&slot, chunk, slot.free};
}

void Engine::submit_leg(const std::shared_ptr<BucketJob>& job, Underway* underway) {
  const std::vector<Step>& steps = *job->plan->steps;
  do {
    underway->event = submit_step(job, steps[underway->num_ordered++], underway);
  } while (underway->num_ordered < steps.size() && !steps[underway->num_ordered].begins_leg);
  if (underway->num_ordered == steps.size() && underway->slot) underway->slot->free = underway->event;
}

EventPtr Engine::submit_step(const std::shared_ptr<BucketJob>& job, const Step& step, Underway* underway) {
  const int64_t chunk = underway->chunk;
  // An all-gather's nbytes are of its result, of which each rank sends a part.
  const int64_t from_nbytes = step.operation == Operation::kAllGather ? step.nbytes / step.num_ranks : step.nbytes;
  WireSpan from = span(job, *underway, step.from, from_nbytes);
  WireSpan to = span(job, *underway, step.to, step.nbytes);
  Lane& lane = lane_of(*job, step.role);
  // The step belongs to the job's plan, and both stages below keep the job.
  if (is_collective(step.operation)) {
    const Wire dtype = job->plan->layouts.front().wire;
    auto transfer = [this, &step, dtype, from = std::move(from), to = std::move(to)](Lane::Completion done) {
      start_collective(step, dtype, from, to, std::move(done));
    };
    return lane.start(std::move(underway->event), wire_stage(job, step.stage, chunk, std::move(transfer)));
  }
  return lane.run(std::move(underway->event),
                  stage(job, step.stage, chunk, [this, &own = *job, &step, chunk, from = from.data, to = to.data] {
                    run_codec(own, step, chunk, from, to);
                  }));
}

bool Engine::is_on_wire(const BucketJob& job) const {
  return device_->wire_runs_stages() && job.plan->num_chunks() == 1 && !job.plan->has_three_wires() &&
         job.grad_nbytes <= device_->max_nbytes_on_wire();
}

Lane& Engine::lane_of(const BucketJob& job, LaneRole role) const {
  if (is_on_wire(job)) return lane(LaneRole::kScatter);
  // In a bucket of one chunk nothing else uses the wire between the collectives before and after a sum. If the sum runs
  // on the wire's own lane, these need no events to wait for each other. With three wires the sum over hosts always
  // runs on the one between them: it is of few elements, and must not wait for an earlier bucket's unpack.
  if (role == LaneRole::kReduce && device_->wire_runs_stages()) {
    if (job.plan->has_three_wires()) return lane(LaneRole::kCrossScatter);
    if (job.plan->num_chunks() == 1) return lane(LaneRole::kScatter);
  }
  return lane(role);
}

WireSpan Engine::span(const std::shared_ptr<BucketJob>& job, const Underway& underway, Buffer buffer,
                      int64_t nbytes) const {
  const Slot* const slot = underway.slot;
  const int64_t chunk = underway.chunk;
  switch (buffer) {
    case Buffer::kGradients:
      if (!job->plan->in_place) return {};
      return {static_cast<std::byte*>(job->payloads.front().slices.lossy.slices().front().data), nbytes, job};
    case Buffer::kOutgoing:
      return {slot->outgoing.get(), nbytes, slot->outgoing};
    case Buffer::kIncoming:
      return {slot->incoming.get(), nbytes, slot->incoming};
    case Buffer::kOwnMessage:
      return {slot->incoming.get() + rank() * job->plan->chunk_nbytes(), nbytes, slot->incoming};
    case Buffer::kKeptCodes:
      return {job->kept->codes.get() + chunk * nbytes, nbytes, job->kept->codes};
    case Buffer::kKeptMeans:
      return {job->kept->means.get() + chunk * job->plan->chunk_nbytes(), nbytes, job->kept->means};
  }
  return {};
}

void Engine::start_collective(const Step& step, Wire dtype, const WireSpan& from, const WireSpan& to,
                              Lane::Completion done) {
  if (step.operation == Operation::kAllToAll) {
    transport_->all_to_all(step.channel, from, to, std::move(done));
  } else if (step.operation == Operation::kAllReduce) {
    transport_->all_reduce(step.channel, from, dtype, std::move(done));
  } else {
    transport_->all_gather(step.channel, from, to, std::move(done));
  }
}

void Engine::run_codec(BucketJob& job, const Step& step, int64_t chunk, const std::byte* from, std::byte* to) {
  switch (step.operation) {
    case Operation::kScale:
      return scale(job);
    case Operation::kPack:
      return pack(job, chunk, to);
    case Operation::kLocalReduce:
      return local_reduce(job, chunk, from, to);
    case Operation::kReduce:
      return reduce(job, chunk, from, to);
    default:  // kUnpack, kSum
      return unpack(job, chunk, from, step.num_ranks);
  }
}

void Engine::scale(BucketJob& job) {
  job.num_nonfinite = device_->scale_in_place(job.payloads.front().slices, job.pack_scale());
  if (job.num_nonfinite != 0 && job.on_nonfinite) job.on_nonfinite(job, 0);
}

void Engine::pack(BucketJob& job, int64_t chunk, std::byte* out) {
  if (job.is_packed) return;
  if (chunk == 0) job.decorate(&JobDecorator::before_pack);
  int64_t count = 0;
  const std::vector<BucketLayout>& layouts = job.plan->packed_layouts();
  for (size_t i = 0; i < job.payloads.size(); ++i) {
    const Payload& payload = job.payloads[i];
    count += device_->pack({layouts[i], chunk, payload.slices, job.pack_scale(), out, payload.pack});
  }
  if (job.head) {
    const BucketLayout& layout = layouts.front();
    device_->add_heads(job.head->own, 0, 1, out, layout.part_stride, layout.num_parts);
  }
  job.num_nonfinite += count;
  if (count != 0 && job.on_nonfinite) job.on_nonfinite(job, chunk);
  ++job.num_packed;
}

void Engine::pack_rest(BucketJob& job) {
  for (int64_t chunk = job.num_packed; chunk < job.plan->num_chunks(); ++chunk) {
    pack(job, chunk, job.kept->codes.get() + chunk * job.plan->chunk_nbytes());
  }
}

void Engine::unpack_kept(BucketJob& job) {
  for (int64_t chunk = 0; chunk < job.plan->num_chunks(); ++chunk) {
    unpack(job, chunk, job.kept->means.get() + chunk * job.plan->chunk_nbytes(), 1);
  }
  job.decorate(&JobDecorator::after_unpack);
}

void Engine::local_reduce(const BucketJob& job, int64_t chunk, const std::byte* parts, std::byte* out) {
  const std::vector<BucketLayout>& encoded = job.plan->encoded_layouts();
  if (job.head) {
    const BucketLayout& from = job.plan->host_layouts.front();
    device_->add_heads(parts, from.part_stride, from.num_parts, out, encoded.front().part_stride, place_.num_hosts);
  }
  for (size_t i = 0; i < job.payloads.size(); ++i) {
    ReduceArgs args{job.plan->host_layouts[i], parts, 1, encoded[i], out};
    args.num_parts = place_.num_hosts;
    args.chunk = chunk;
    args.residual = job.payloads[i].local_reduce;
    device_->reduce(args);
  }
}

void Engine::reduce(const BucketJob& job, int64_t chunk, const std::byte* parts, std::byte* out) {
  if (job.head) {
    const int64_t stride = job.plan->layouts.front().part_stride;
    device_->add_heads(parts, stride, place_.num_hosts, out, stride, 1);
    if (chunk == 0) device_->add_heads(out, 0, 1, job.head->reduced, 0, 1);
  }
  if (chunk == 0) job.decorate(&JobDecorator::before_reduce);
  for (size_t i = 0; i < job.payloads.size(); ++i) {
    const BucketLayout& to = job.plan->layouts[i];
    BucketLayout from = to;
    from.num_parts = place_.num_hosts;  // on one level, the number of ranks
    ReduceArgs args{from, parts, job.plan->reduce_scale, to, out};
    args.chunk = chunk;
    args.residual = job.payloads[i].reduce;
    device_->reduce(args);
  }
}

void Engine::unpack(const BucketJob& job, int64_t chunk, const std::byte* parts, int64_t num_messages) {
  if (job.head) {
    device_->add_heads(parts, job.plan->layouts.front().chunk_nbytes(), num_messages, job.head->sum, 0, 1);
  }
  for (size_t i = 0; i < job.payloads.size(); ++i) {
    const Payload& payload = job.payloads[i];
    const BucketSlices& slices = payload.unpacked ? *payload.unpacked : payload.slices;
    device_->unpack({job.plan->layouts[i], chunk, parts, job.unpack_scale(), slices, num_messages});
  }
}

void Engine::finish(const std::shared_ptr<BucketJob>& job, std::exception_ptr error) {
  // `error` is of the last chunk, and an earlier one may have failed: the bucket is good only if nothing ever failed.
  // An error outside of a stage, between streams, does not name the bucket yet. If it is not the first failure, it is a
  // consequence of that.
  if (const std::exception_ptr first = failure_->get()) {
    error = first;
  } else if (error) {
    error = failure_->fail(*job, "ordering of streams", 0, error);
  }
  StampPtr done;
  if (!error) {
    try {
      const Moment end = device_->moment();
      done = end.stamp;
      if (end.event) ended_ = end.event;  // the job ends within submit(), which holds the mutex
      if (job->counted) account(*job, done);
    } catch (...) {
      error = failure_->fail(*job, "completion", 0, std::current_exception());
    }
  }
  board_->end(job->number, std::move(done));
  job->profiled = nullptr;  // a profiler may end as soon as the bucket's result is there
  for (const auto& decorator : job->decorators) error = decorator->ended(std::move(error));
  job->on_done(std::move(error));
}

void Engine::account(const BucketJob& job, const StampPtr& done) {
  if (tracer_->on()) {
    tracer_->add(job.label, Stage::kBucket, job.step, 0, job.submitted, done);
    if (job.is_last) tracer_->add(job.label, Stage::kExposed, job.step, 0, job.submitted, done);
  }
  EngineStats bucket;
  bucket.num_steps = job.is_last ? 1 : 0;
  bucket.num_buckets = 1;
  bucket.grad_nbytes = job.grad_nbytes;
  bucket.sent_nbytes = sent_nbytes(*job.plan);
  const int64_t ranks_on_host = std::max(config_.ranks_on_host, place_.ranks_per_host);
  bucket.sent_between_hosts_nbytes = sent_between_hosts_nbytes(*job.plan, ranks_on_host, config_.links_of_host);
  bucket.num_nonfinite = job.num_nonfinite;
  stats_.add(bucket, job.submitted, done);
}

Lane::Task Engine::stage(const std::shared_ptr<BucketJob>& job, Stage stage, int64_t chunk, Lane::Task body) {
  return [of = observers_, job, stage, chunk, body = std::move(body)] {
    if (auto first = of->failure->get()) std::rethrow_exception(first);
    const StageScope scope(*of->device, *of->tracer, *of->board, *job, stage, chunk);
    try {
      body();
      of->device->settle();
      scope.end();
    } catch (...) {
      // The stage stays on the board, so that reports say what its bucket is waiting for.
      std::rethrow_exception(of->failure->fail(*job, stage_name(stage), chunk, std::current_exception()));
    }
    of->board->end_stage(scope.entry());
  };
}

Lane::Transfer Engine::wire_stage(const std::shared_ptr<BucketJob>& job, Stage stage, int64_t chunk,
                                  Lane::Transfer body) {
  return [of = observers_, job, stage, chunk, body = std::move(body)](Lane::Completion done) {
    // After a failure nothing more is sent: peers would take it for the message that was not sent.
    if (auto first = of->failure->get()) std::rethrow_exception(first);
    const StageScope scope(*of->device, *of->tracer, *of->board, *job, stage, chunk);
    try {
      body([of, job, stage, chunk, began = scope.began(), entry = scope.entry(),
            done = std::move(done)](std::exception_ptr cause) {
        if (began) of->tracer->add(job->label, stage, job->step, chunk, began, of->device->stamp());
        if (!cause) of->board->end_stage(entry);
        done(cause ? of->failure->fail(*job, stage_name(stage), chunk, cause) : nullptr);
      });
      of->device->settle();
    } catch (...) {
      std::rethrow_exception(of->failure->fail(*job, stage_name(stage), chunk, std::current_exception()));
    }
  };
}

}  // namespace fusedcomm
