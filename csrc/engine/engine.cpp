#include "engine/engine.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace fusedcomm {
namespace {

constexpr size_t kNumRecentSteps = 512;

void push_recent(std::vector<float>* recent, int64_t num_steps, double value) {
  if (recent->size() < kNumRecentSteps) {
    recent->push_back(static_cast<float>(value));
  } else {
    (*recent)[static_cast<size_t>(num_steps) % kNumRecentSteps] = static_cast<float>(value);
  }
}

int64_t num_chunks_of(const BucketPlan& plan) { return std::max<int64_t>(1, plan.in_place ? 1 : plan.num_chunks()); }

// Around the body of a stage: a range for profilers, an entry on the board, and while somebody traces, when it was.
class StageScope {
 public:
  StageScope(Device& device, Tracer& tracer, Board& board, const BucketJob& job, Stage stage, int64_t chunk)
      : device_(device),
        tracer_(tracer),
        job_(job),
        stage_(stage),
        chunk_(chunk),
        entry_(board.begin_stage(job.number, stage, chunk)) {
    device_.range_push(job.label->ranges[static_cast<size_t>(stage)]);
    if (tracer_.on()) begin_ = device_.stamp();
  }
  ~StageScope() { device_.range_pop(); }
  StageScope(const StageScope&) = delete;
  StageScope& operator=(const StageScope&) = delete;

  const StampPtr& began() const { return begin_; }
  size_t entry() const { return entry_; }
  void end() const {
    if (begin_) tracer_.add(job_.label, stage_, job_.step, chunk_, begin_, device_.stamp());
  }

 private:
  Device& device_;
  Tracer& tracer_;
  const BucketJob& job_;
  const Stage stage_;
  const int64_t chunk_;
  const size_t entry_;
  StampPtr begin_;
};

}  // namespace

void FailureLatch::explain_with(Explain explain) {
  std::lock_guard<std::mutex> lock(mutex_);
  explain_ = std::move(explain);
}

std::exception_ptr FailureLatch::get() const {
  std::unique_lock<std::mutex> lock(mutex_);
  explained_.wait(lock, [this] { return !explaining_; });
  return first_;
}

void FailureLatch::set(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!first_ && !explaining_) first_ = std::move(error);
}

bool FailureLatch::has_failed() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failed_;
}

std::exception_ptr FailureLatch::fail(const BucketJob& job, const std::string& stage, int64_t chunk,
                                      std::exception_ptr cause) {
  std::string what = "unknown error";
  try {
    std::rethrow_exception(cause);
  } catch (const std::exception& e) {
    what = e.what();
  } catch (...) {
  }
  const std::string failure = "the " + stage + " of chunk " + std::to_string(chunk + 1) + "/" +
                              std::to_string(num_chunks_of(job.plan)) + " failed for " + job.label->text + ": " + what;
  const std::string text =
      "fusedcomm: rank " + std::to_string(rank_) + " of " + std::to_string(world_size_) + ": " + failure +
      "\nThe gradients of this step are not valid. If another rank died or left, its own log says why; restart the "
      "job from a checkpoint.";
  std::unique_lock<std::mutex> lock(mutex_);
  if (first_ || explaining_) return std::make_exception_ptr(std::runtime_error(text));
  failed_ = true;
  std::string explanation;
  if (explain_) {
    explaining_ = true;
    const Explain explain = explain_;  // another may be set meanwhile
    lock.unlock();
    try {
      explanation = explain(failure);
    } catch (...) {  // the failure itself is what counts
    }
    lock.lock();
    explaining_ = false;
  }
  if (!explanation.empty()) explanation = "\n" + explanation;
  first_ = std::make_exception_ptr(std::runtime_error(text + explanation));
  explained_.notify_all();
  return first_;
}

Engine::Engine(const WireConfig& config, std::shared_ptr<Device> device, std::shared_ptr<Transport> transport)
    : config_(config),
      device_(std::move(device)),
      transport_(std::move(transport)),
      place_(transport_->place()),
      failure_(std::make_shared<FailureLatch>(transport_->rank(), transport_->world_size())) {
  check_config(config_);
  if (config_.ranks_per_host != place_.ranks_per_host) {
    throw std::invalid_argument("the configuration is for " + std::to_string(config_.ranks_per_host) +
                                " ranks on a host, the transport for " + std::to_string(place_.ranks_per_host));
  }
  stats_.recent_exposed_ms.reserve(kNumRecentSteps);
  stats_.recent_busy_ms.reserve(kNumRecentSteps);
  slot_nbytes_ = workspace_nbytes(config_, transport_->world_size());
  one_shot_ = is_one_shot(config_, world_size());
  slots_.resize(static_cast<size_t>(config_.num_slots));
  for (Slot& slot : slots_) {
    if (!one_shot_) slot.outgoing = device_->allocate(slot_nbytes_);
    slot.incoming = device_->allocate(one_shot_ ? world_size() * slot_nbytes_ : slot_nbytes_);
  }
  pack_lane_ = device_->make_lane(LaneRole::kPack);
  scatter_lane_ = device_->make_lane(LaneRole::kScatter);
  reduce_lane_ = device_->make_lane(LaneRole::kReduce);
  gather_lane_ = device_->make_lane(LaneRole::kGather);
  unpack_lane_ = device_->make_lane(LaneRole::kUnpack);
  if (place_.on_two_levels()) {
    local_reduce_lane_ = device_->make_lane(LaneRole::kLocalReduce);
    cross_scatter_lane_ = device_->make_lane(LaneRole::kCrossScatter);
    cross_gather_lane_ = device_->make_lane(LaneRole::kCrossGather);
  }
}

Engine::~Engine() { stop("its engine was destroyed"); }

void Engine::stop(const std::string& reason) {
  const auto error = std::make_exception_ptr(std::runtime_error(
      "fusedcomm: rank " + std::to_string(transport_->rank()) + ": a bucket was given up because " + reason));
  failure_->set(error);
  // What fails upstream is passed down, and its jobs end on the unpack lane.
  for (Lane* lane : lanes()) lane->stop(error);
}

void Engine::free_workspaces() {
  std::lock_guard<std::mutex> lock(submit_mutex_);
  slots_.clear();
}

std::vector<Lane*> Engine::lanes() const {
  std::vector<Lane*> lanes;
  for (const auto* lane : {&pack_lane_, &scatter_lane_, &local_reduce_lane_, &cross_scatter_lane_, &reduce_lane_,
                           &cross_gather_lane_, &gather_lane_, &unpack_lane_}) {
    if (*lane) lanes.push_back(lane->get());
  }
  return lanes;
}

void Engine::check_fits_workspaces(const BucketPlan& plan) const {
  if (plan.in_place || plan.layouts.empty()) return;  // in none of them
  const int64_t chunk_nbytes = std::max(plan.chunk_nbytes(), plan.host_chunk_nbytes());
  if (chunk_nbytes > slot_nbytes_) {
    throw std::length_error("a chunk of " + std::to_string(chunk_nbytes) + " bytes does not fit a workspace of " +
                            std::to_string(slot_nbytes_));
  }
  if (plan.sums_codes() && (plan.sum == Sum::kOneShot) != one_shot_) {
    throw std::length_error("sum='" + sum_name(plan.sum) + "' has other workspaces than this engine, whose sums are " +
                            (one_shot_ ? "" : "not ") + "one-shot");
  }
}

bool Engine::begin(const std::shared_ptr<BucketJob>& job) {
  job->step = submitted_steps_;
  if (job->is_last) ++submitted_steps_;
  job->number = board_->hand_over(job->label, job->step, job->is_last, num_chunks_of(job->plan));
  std::exception_ptr error = failure_->get();
  if (!error) {
    try {
      check_fits_workspaces(job->plan);
    } catch (...) {
      error = failure_->fail(*job, "planning", 0, std::current_exception());
    }
  }
  if (!error) {
    try {
      Moment handed = device_->caller_moment();
      job->submitted = std::move(handed.stamp);
      pack_lane_->wait(std::move(handed.event));
    } catch (...) {
      error = failure_->fail(*job, "hand-over", 0, std::current_exception());
    }
  }
  if (error) finish(job, error);
  return !error;
}

void Engine::submit(std::shared_ptr<BucketJob> job) {
  std::lock_guard<std::mutex> lock(submit_mutex_);
  if (!begin(job)) return;
  EventPtr end;
  if (job->plan.in_place) {
    end = submit_in_place(job);
  } else {
    const int num_legs = job->plan.on_two_levels() ? 3 : 2;
    const int64_t num_chunks = job->plan.num_chunks();
    std::deque<Underway> underway;
    for (int64_t chunk = 0; chunk < num_chunks || !underway.empty(); ++chunk) {
      // A chunk goes one leg on when the next one has begun that leg.
      const size_t num_older = underway.size();
      if (chunk < num_chunks) underway.push_back(submit_first_leg(job, chunk));
      for (size_t i = num_older; i-- > 0;) submit_next_leg(job, &underway[i]);
      // But all workspaces may be taken: the oldest has to be through before the next begins.
      const bool is_full = underway.size() == slots_.size();
      while (is_full && underway.front().num_legs < num_legs) submit_next_leg(job, &underway.front());
      while (!underway.empty() && underway.front().num_legs == num_legs) {
        end = underway.front().event;
        underway.pop_front();
      }
    }
  }
  // Nothing to sum; its times are of the caller's stream nevertheless.
  if (!end) end = pack_lane_->run(nullptr, [] {});
  unpack_lane_->finally(end, [this, job](std::exception_ptr error) { finish(job, std::move(error)); });
}

void Engine::submit_foreign(std::shared_ptr<BucketJob> job, ForeignStages stages) {
  std::lock_guard<std::mutex> lock(submit_mutex_);
  if (!begin(job)) return;
  EventPtr end;
  if (stages.pack) {
    end = pack_lane_->run(nullptr, stage(job, Stage::kPack, 0, std::move(stages.pack)));
  } else {
    end = pack_lane_->run(nullptr, [] {});
  }
  end = scatter_lane_->start(std::move(end), wire_stage(job, Stage::kAllReduce, 0, std::move(stages.scatter)));
  if (stages.reduce) end = reduce_lane_->run(std::move(end), stage(job, Stage::kReduce, 0, std::move(stages.reduce)));
  if (stages.gather) {
    end = gather_lane_->start(std::move(end), wire_stage(job, Stage::kAllGather, 0, std::move(stages.gather)));
  }
  if (stages.unpack) end = unpack_lane_->run(std::move(end), stage(job, Stage::kUnpack, 0, std::move(stages.unpack)));
  unpack_lane_->finally(end, [this, job](std::exception_ptr error) { finish(job, std::move(error)); });
}

EventPtr Engine::submit_in_place(const std::shared_ptr<BucketJob>& job) {
  if (job->payloads.front().streams.lossy.numel() == 0) return nullptr;
  EventPtr scaled = pack_lane_->run(nullptr, stage(job, Stage::kPack, 0, [this, job] {
                                      job->num_nonfinite = device_->scale_in_place(job->payloads.front().streams,
                                                                                   job->plan.pack_scale, job->is_last);
                                      if (job->num_nonfinite != 0 && job->on_nonfinite) job->on_nonfinite(*job, 0);
                                    }));
  return scatter_lane_->start(scaled, wire_stage(job, Stage::kAllReduce, 0, [this, job](Lane::Completion done) {
                                const Slice& bucket = job->payloads.front().streams.lossy.slices().front();
                                WireSpan span{static_cast<std::byte*>(bucket.data),
                                              bucket.numel * grad_nbytes(GradDtype::kFloat32), job};
                                transport_->all_reduce(Channel::kScatter, span, Wire::kFp32, std::move(done));
                              }));
}

void Engine::pack(BucketJob& job, int64_t chunk, std::byte* out) {
  if (chunk == 0 && job.before_pack) job.before_pack();
  int64_t count = 0;
  const std::vector<BucketLayout>& layouts = job.plan.packed_layouts();
  for (size_t i = 0; i < job.payloads.size(); ++i) {
    const Payload& payload = job.payloads[i];
    count += device_->pack({layouts[i], chunk, payload.streams, job.plan.pack_scale, out, payload.pack, job.is_last});
  }
  job.num_nonfinite += count;
  if (count != 0 && job.on_nonfinite) job.on_nonfinite(job, chunk);
  const bool is_first_encoder = !job.plan.on_two_levels();
  if (is_first_encoder && chunk == job.plan.num_chunks() - 1 && job.after_first_encoder) job.after_first_encoder();
}

void Engine::local_reduce(const BucketJob& job, int64_t chunk, const std::byte* parts, std::byte* out) {
  for (size_t i = 0; i < job.payloads.size(); ++i) {
    ReduceArgs args{job.plan.host_layouts[i], parts, 1, job.plan.layouts[i], out};
    args.num_parts = place_.num_hosts;
    args.chunk = chunk;
    args.first_part = place_.local_rank * place_.num_hosts;
    args.encoding = job.payloads[i].local_reduce;
    args.is_last = job.is_last;
    device_->reduce(args);
  }
  if (chunk == job.plan.num_chunks() - 1 && job.after_first_encoder) job.after_first_encoder();
}

void Engine::reduce(const BucketJob& job, int64_t chunk, const std::byte* parts, std::byte* out) {
  for (size_t i = 0; i < job.payloads.size(); ++i) {
    const BucketLayout& to = job.plan.layouts[i];
    BucketLayout from = to;
    from.num_parts = place_.num_hosts;  // on one level all ranks
    ReduceArgs args{from, parts, job.plan.reduce_scale, to, out};
    args.chunk = chunk;
    args.first_part = place_.part();
    args.encoding = job.payloads[i].reduce;
    args.is_last = job.is_last;
    device_->reduce(args);
  }
}

void Engine::unpack(const BucketJob& job, int64_t chunk, const std::byte* parts) {
  for (size_t i = 0; i < job.payloads.size(); ++i) {
    const Payload& payload = job.payloads[i];
    const BucketStreams& streams = payload.unpacked ? *payload.unpacked : payload.streams;
    device_->unpack(
        {job.plan.layouts[i], chunk, parts, job.plan.unpack_scale, streams, job.plan.num_messages, job.is_last});
  }
}

Engine::Underway Engine::submit_first_leg(const std::shared_ptr<BucketJob>& job, int64_t chunk) {
  Slot& slot = slots_[next_slot_++ % slots_.size()];
  const BucketPlan& plan = job->plan;
  // What an all-reduce adds up in place lies in either, and one-shot engines have no outgoing one.
  const std::shared_ptr<std::byte>& whole = slot.outgoing ? slot.outgoing : slot.incoming;
  std::byte *const outgoing = whole.get(), *const incoming = slot.incoming.get();
  Underway underway{&slot, chunk, nullptr};
  // In a one-shot a rank's message is packed where all ranks' are to lie.
  std::byte* const packed = plan.sum == Sum::kOneShot ? incoming + rank() * plan.chunk_nbytes() : outgoing;
  underway.event = pack_lane_->run(
      slot.free, stage(job, Stage::kPack, chunk, [this, job, chunk, packed] { pack(*job, chunk, packed); }));
  if (plan.sum == Sum::kOneShot) {
    const WireSpan all{incoming, plan.chunk_nbytes() * plan.num_messages, slot.incoming};
    underway.event = scatter_lane_->start(std::move(underway.event),
                                          wire_stage(job, Stage::kAllGather, chunk, [this, all](Lane::Completion done) {
                                            transport_->all_gather_in_place(Channel::kScatter, all, std::move(done));
                                          }));
  } else if (plan.sum != Sum::kTwoShot) {
    const WireSpan span{outgoing, plan.chunk_nbytes(), whole};
    underway.event = scatter_lane_->start(
        std::move(underway.event), wire_stage(job, Stage::kAllReduce, chunk, [this, job, span](Lane::Completion done) {
          transport_->all_reduce(Channel::kScatter, span, job->plan.layouts.front().wire, std::move(done));
        }));
  } else if (plan.on_two_levels()) {
    underway.event = all_to_all(*scatter_lane_, job, Stage::kLocalAllToAll, Channel::kLocalScatter,
                                plan.host_chunk_nbytes(), &underway);
    underway.event = sum_lane(*job, *local_reduce_lane_)
                         .run(std::move(underway.event),
                              stage(job, Stage::kLocalReduce, chunk, [this, job, chunk, outgoing, incoming] {
                                local_reduce(*job, chunk, incoming, outgoing);
                              }));
  } else {
    underway.event =
        all_to_all(*scatter_lane_, job, Stage::kAllToAll, Channel::kScatter, plan.chunk_nbytes(), &underway);
    underway.event =
        sum_lane(*job, *reduce_lane_)
            .run(std::move(underway.event), stage(job, Stage::kReduce, chunk, [this, job, chunk, outgoing, incoming] {
                   reduce(*job, chunk, incoming, outgoing);
                 }));
  }
  return underway;
}

void Engine::submit_next_leg(const std::shared_ptr<BucketJob>& job, Underway* underway) {
  const BucketPlan& plan = job->plan;
  const int64_t chunk = underway->chunk, part_nbytes = plan.layouts.front().part_stride;
  std::byte *const outgoing = underway->slot->outgoing.get(), *const incoming = underway->slot->incoming.get();
  const std::byte* result = outgoing ? outgoing : incoming;
  ++underway->num_legs;
  if (plan.on_two_levels() && underway->num_legs == 2) {
    underway->event = all_to_all(*cross_scatter_lane_, job, Stage::kAllToAll, Channel::kCrossScatter,
                                 place_.num_hosts * part_nbytes, underway);
    underway->event =
        sum_lane(*job, *reduce_lane_)
            .run(std::move(underway->event), stage(job, Stage::kReduce, chunk, [this, job, chunk, outgoing, incoming] {
                   reduce(*job, chunk, incoming, outgoing);
                 }));
    return;
  }
  if (plan.on_two_levels()) {
    underway->event = all_gather(*cross_gather_lane_, job, Stage::kAllGather, Channel::kCrossGather, part_nbytes,
                                 underway, /*back=*/false);
    underway->event = all_gather(*gather_lane_, job, Stage::kLocalAllGather, Channel::kLocalGather,
                                 place_.num_hosts * part_nbytes, underway, /*back=*/true);
  } else if (plan.sum == Sum::kTwoShot) {
    underway->event =
        all_gather(*gather_lane_, job, Stage::kAllGather, Channel::kGather, part_nbytes, underway, /*back=*/false);
    result = incoming;
  } else if (plan.sum == Sum::kOneShot) {
    result = incoming;
  }
  underway->event = underway->slot->free =
      unpack_lane_->run(std::move(underway->event),
                        stage(job, Stage::kUnpack, chunk, [this, job, chunk, result] { unpack(*job, chunk, result); }));
}

Lane& Engine::sum_lane(const BucketJob& job, Lane& own) const {
  return device_->wire_runs_stages() && job.plan.num_chunks() == 1 ? *scatter_lane_ : own;
}

EventPtr Engine::all_to_all(Lane& lane, const std::shared_ptr<BucketJob>& job, Stage stage, Channel channel,
                            int64_t nbytes, Underway* underway) {
  const Slot& slot = *underway->slot;
  const WireSpan outgoing{slot.outgoing.get(), nbytes, slot.outgoing};
  const WireSpan incoming{slot.incoming.get(), nbytes, slot.incoming};
  return lane.start(std::move(underway->event),
                    wire_stage(job, stage, underway->chunk, [this, channel, outgoing, incoming](Lane::Completion done) {
                      transport_->all_to_all(channel, outgoing, incoming, std::move(done));
                    }));
}

EventPtr Engine::all_gather(Lane& lane, const std::shared_ptr<BucketJob>& job, Stage stage, Channel channel,
                            int64_t part_nbytes, Underway* underway, bool back) {
  const Slot& slot = *underway->slot;
  const auto &from = back ? slot.incoming : slot.outgoing, &to = back ? slot.outgoing : slot.incoming;
  const int64_t num_ranks = channel == Channel::kGather        ? world_size()
                            : channel == Channel::kLocalGather ? place_.ranks_per_host
                                                               : place_.num_hosts;
  const WireSpan send{from.get(), part_nbytes, from};
  const WireSpan receive{to.get(), part_nbytes * num_ranks, to};
  return lane.start(std::move(underway->event),
                    wire_stage(job, stage, underway->chunk, [this, channel, send, receive](Lane::Completion done) {
                      transport_->all_gather(channel, send, receive, std::move(done));
                    }));
}

void Engine::finish(const std::shared_ptr<BucketJob>& job, std::exception_ptr error) {
  // A chunk before the last may have failed: the bucket is good only if nothing ever did. What fails outside of a
  // stage, between streams, has no name yet; if it is not the first failure, it is a consequence of that.
  if (const std::exception_ptr first = failure_->get()) {
    error = first;
  } else if (error) {
    error = failure_->fail(*job, "ordering of streams", 0, error);
  }
  StampPtr done;
  if (!error) {
    try {
      done = device_->stamp();
      if (job->counted) account(*job, done);
    } catch (...) {
      error = failure_->fail(*job, "completion", 0, std::current_exception());
    }
  }
  board_->end(job->number, std::move(done));
  job->on_done(error);
}

void Engine::account(const BucketJob& job, const StampPtr& done) {
  if (tracer_->on()) {
    tracer_->add(job.label, Stage::kBucket, job.step, 0, job.submitted, done);
    if (job.is_last) tracer_->add(job.label, Stage::kExposed, job.step, 0, job.submitted, done);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.num_buckets += 1;
  stats_.grad_nbytes += job.grad_nbytes;
  stats_.sent_nbytes += sent_nbytes(job.plan, world_size());
  stats_.sent_between_hosts_nbytes += sent_between_hosts_nbytes(job.plan, world_size(), place_.ranks_per_host);
  stats_.num_nonfinite += job.num_nonfinite;
  if (job.is_last) stats_.num_steps += 1;
  untimed_.push_back({job.submitted, done, job.is_last});
  if (job.is_last) take_times();
}

void Engine::take_times() {
  for (;;) {
    const auto last = std::find_if(untimed_.begin(), untimed_.end(), [](const Interval& b) { return b.is_last; });
    if (last == untimed_.end() || !last->done->reached()) return;
    take_pass(static_cast<size_t>(last - untimed_.begin()) + 1);
  }
}

// A bucket is handed over after the one before it, and is done after it. So the time in which at least one is under way
// is all from the first one's hand-over on, without what lies between a bucket's end and the next one's hand-over.
void Engine::take_pass(size_t num_buckets) {
  const auto begin = untimed_.begin(), end = begin + static_cast<std::ptrdiff_t>(num_buckets);
  // All of them lie before the last one's end, which has been reached.
  std::for_each(begin, end, [](const Interval& bucket) {
    bucket.submitted->mark_reached();
    bucket.done->mark_reached();
  });
  const Interval& last = *(end - 1);
  double busy_ms = last.done->ms_since(*begin->submitted);
  const double exposed_ms = num_buckets == 1 ? busy_ms : last.done->ms_since(*last.submitted);
  for (auto bucket = begin; bucket != end; ++bucket) {
    if (bucket != begin) {
      busy_ms -= std::max(0.0, bucket->submitted->ms_since(*(bucket - 1)->done));
    } else if (last_done_) {
      busy_ms -= std::max(0.0, last_done_->ms_since(*bucket->submitted));
    }
  }
  last_done_ = last.done;
  untimed_.erase(begin, end);
  stats_.busy_ms += busy_ms;
  push_recent(&stats_.recent_exposed_ms, num_timed_steps_, exposed_ms);
  push_recent(&stats_.recent_busy_ms, num_timed_steps_, busy_ms);
  ++num_timed_steps_;
}

Lane::Task Engine::stage(const std::shared_ptr<BucketJob>& job, Stage stage, int64_t chunk, Lane::Task body) {
  return [failure = failure_, device = device_, tracer = tracer_, board = board_, job, stage, chunk,
          body = std::move(body)] {
    if (auto first = failure->get()) std::rethrow_exception(first);
    const StageScope scope(*device, *tracer, *board, *job, stage, chunk);
    try {
      body();
      device->settle();
      scope.end();
    } catch (...) {
      // The stage stays on the board, for whoever asks what its bucket is waiting for.
      std::rethrow_exception(failure->fail(*job, stage_name(stage), chunk, std::current_exception()));
    }
    board->end_stage(scope.entry());
  };
}

Lane::Transfer Engine::wire_stage(const std::shared_ptr<BucketJob>& job, Stage stage, int64_t chunk,
                                  Lane::Transfer body) {
  return [failure = failure_, device = device_, tracer = tracer_, board = board_, job, stage, chunk,
          body = std::move(body)](Lane::Completion done) {
    // After a failure nothing more goes out: the peers would take it for what was left out.
    if (auto first = failure->get()) std::rethrow_exception(first);
    const StageScope scope(*device, *tracer, *board, *job, stage, chunk);
    try {
      body([failure, device, tracer, board, job, stage, chunk, began = scope.began(), entry = scope.entry(),
            done = std::move(done)](std::exception_ptr cause) {
        if (began) tracer->add(job->label, stage, job->step, chunk, began, device->stamp());
        if (!cause) board->end_stage(entry);
        done(cause ? failure->fail(*job, stage_name(stage), chunk, cause) : nullptr);
      });
      device->settle();
    } catch (...) {
      std::rethrow_exception(failure->fail(*job, stage_name(stage), chunk, std::current_exception()));
    }
  };
}

EngineStats Engine::stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  take_times();
  return stats_;
}

}  // namespace fusedcomm
