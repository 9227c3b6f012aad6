#include "engine.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace fusedcomm {
namespace {

constexpr size_t kNumRecentSteps = 512;

double elapsed_ms(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

void push_recent(std::vector<float>* recent, int64_t num_steps, double value) {
  if (recent->size() < kNumRecentSteps) {
    recent->push_back(static_cast<float>(value));
  } else {
    (*recent)[static_cast<size_t>(num_steps) % kNumRecentSteps] = static_cast<float>(value);
  }
}

}  // namespace

std::exception_ptr FailureLatch::get() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return first_;
}

void FailureLatch::set(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!first_) first_ = std::move(error);
}

std::exception_ptr FailureLatch::fail(const BucketJob& job, const char* stage, int64_t chunk,
                                      std::exception_ptr cause) {
  std::string what = "unknown error";
  try {
    std::rethrow_exception(cause);
  } catch (const std::exception& e) {
    what = e.what();
  } catch (...) {
  }
  const int64_t num_chunks = std::max<int64_t>(1, job.plan.in_place ? 1 : job.plan.layout.num_chunks);
  auto error = std::make_exception_ptr(std::runtime_error(
      "fusedcomm: rank " + std::to_string(rank_) + " of " + std::to_string(world_size_) + ": the " + stage +
      " of chunk " + std::to_string(chunk + 1) + "/" + std::to_string(num_chunks) + " failed for " + *job.label + ": " +
      what +
      "\nThe gradients of this step are not valid. If another rank died or left, its own log says why; restart the "
      "job from a checkpoint."));
  set(error);
  return error;
}

Engine::Engine(const WireConfig& config, std::shared_ptr<Device> device, std::shared_ptr<Transport> transport)
    : config_(config),
      device_(std::move(device)),
      transport_(std::move(transport)),
      failure_(std::make_shared<FailureLatch>(transport_->rank(), transport_->world_size())) {
  check_config(config_);
  stats_.recent_exposed_ms.reserve(kNumRecentSteps);
  stats_.recent_busy_ms.reserve(kNumRecentSteps);
  slot_nbytes_ = workspace_nbytes(config_, transport_->world_size());
  slots_.resize(static_cast<size_t>(config_.num_slots));
  for (Slot& slot : slots_) {
    slot.outgoing = device_->allocate(slot_nbytes_);
    slot.incoming = device_->allocate(slot_nbytes_);
  }
  pack_lane_ = device_->make_lane("fc-pack");
  scatter_lane_ = device_->make_lane("fc-scatter");
  reduce_lane_ = device_->make_lane("fc-reduce");
  gather_lane_ = device_->make_lane("fc-gather");
  unpack_lane_ = device_->make_lane("fc-unpack");
}

Engine::~Engine() { stop("its engine was destroyed"); }

void Engine::stop(const std::string& reason) {
  const auto error = std::make_exception_ptr(std::runtime_error(
      "fusedcomm: rank " + std::to_string(transport_->rank()) + ": a bucket was given up because " + reason));
  failure_->set(error);
  // Upstream first: what fails there is passed down and its jobs end on the unpack lane.
  for (Lane* lane :
       {pack_lane_.get(), scatter_lane_.get(), reduce_lane_.get(), gather_lane_.get(), unpack_lane_.get()}) {
    lane->stop(error);
  }
}

void Engine::submit(std::shared_ptr<BucketJob> job) {
  std::lock_guard<std::mutex> lock(submit_mutex_);
  job->submitted = Clock::now();
  if (auto error = failure_->get()) return finish(job, error);

  if (!job->plan.in_place && job->plan.layout.chunk_nbytes() > slot_nbytes_) {
    return finish(job, failure_->fail(*job, "planning", 0,
                                      std::make_exception_ptr(std::length_error(
                                          "a chunk of " + std::to_string(job->plan.layout.chunk_nbytes()) +
                                          " bytes does not fit a workspace of " + std::to_string(slot_nbytes_)))));
  }
  EventPtr end;
  if (job->plan.in_place) {
    end = submit_in_place(job);
  } else {
    for (int64_t chunk = 0; chunk < job->plan.layout.num_chunks; ++chunk) end = submit_chunk(job, chunk);
  }
  unpack_lane_->finally(end, [this, job](std::exception_ptr error) { finish(job, std::move(error)); });
}

void Engine::submit_foreign(std::shared_ptr<BucketJob> job, ForeignStages stages) {
  std::lock_guard<std::mutex> lock(submit_mutex_);
  job->submitted = Clock::now();
  if (auto error = failure_->get()) return finish(job, error);
  EventPtr end = pack_lane_->run(nullptr, stage(job, "pack", 0, std::move(stages.pack)));
  end = scatter_lane_->start(end, wire_stage(job, "first collective", 0, std::move(stages.scatter)));
  if (stages.reduce) end = reduce_lane_->run(end, stage(job, "reduce", 0, std::move(stages.reduce)));
  if (stages.gather) end = gather_lane_->start(end, wire_stage(job, "second collective", 0, std::move(stages.gather)));
  if (stages.unpack) end = unpack_lane_->run(end, stage(job, "unpack", 0, std::move(stages.unpack)));
  unpack_lane_->finally(end, [this, job](std::exception_ptr error) { finish(job, std::move(error)); });
}

EventPtr Engine::submit_in_place(const std::shared_ptr<BucketJob>& job) {
  if (job->streams.lossy.numel() == 0) return nullptr;
  EventPtr scaled = pack_lane_->run(nullptr, stage(job, "pack", 0, [this, job] {
                                      job->num_nonfinite =
                                          device_->scale_in_place(job->streams.lossy, job->plan.pack_scale);
                                      if (job->num_nonfinite != 0 && job->on_nonfinite) job->on_nonfinite(*job, 0);
                                    }));
  return scatter_lane_->start(scaled, wire_stage(job, "all-reduce", 0, [this, job](Lane::Completion done) {
                                const Slice& bucket = job->streams.lossy.slices().front();
                                WireSpan span{static_cast<std::byte*>(bucket.data),
                                              bucket.numel * grad_nbytes(GradDtype::kFloat32), job};
                                transport_->all_reduce(Channel::kScatter, span, Wire::kFp32, std::move(done));
                              }));
}

EventPtr Engine::submit_chunk(const std::shared_ptr<BucketJob>& job, int64_t chunk) {
  Slot& slot = slots_[next_slot_++ % slots_.size()];
  const int64_t nbytes = job->plan.layout.chunk_nbytes();
  const WireSpan outgoing{slot.outgoing.get(), nbytes, slot.outgoing};
  const WireSpan incoming{slot.incoming.get(), nbytes, slot.incoming};

  EventPtr packed = pack_lane_->run(slot.free, stage(job, "pack", chunk, [this, job, chunk, outgoing] {
                                      const int64_t count = device_->pack(
                                          {job->plan.layout, chunk, job->streams, job->plan.pack_scale, outgoing.data});
                                      job->num_nonfinite += count;
                                      if (count != 0 && job->on_nonfinite) job->on_nonfinite(*job, chunk);
                                    }));

  EventPtr summed;
  WireSpan result = outgoing;
  if (job->plan.sum == Sum::kTwoShot) {
    EventPtr scattered = scatter_lane_->start(
        packed, wire_stage(job, "all-to-all", chunk, [this, outgoing, incoming](Lane::Completion done) {
          transport_->all_to_all(Channel::kScatter, outgoing, incoming, std::move(done));
        }));
    EventPtr reduced = reduce_lane_->run(
        scattered, stage(job, "reduce", chunk, [this, job, outgoing, incoming] {
          device_->reduce({job->plan.layout, incoming.data, job->plan.reduce_scale, outgoing.data, world_size()});
        }));
    // The all-gather is an all-to-all of equal parts: gloo's own all-gather allocates and copies at every call.
    summed = gather_lane_->start(
        reduced, wire_stage(job, "all-gather", chunk, [this, outgoing, incoming](Lane::Completion done) {
          transport_->all_to_all(Channel::kGather, outgoing, incoming, std::move(done));
        }));
    result = incoming;
  } else {
    summed = scatter_lane_->start(
        packed, wire_stage(job, "all-reduce", chunk, [this, job, outgoing](Lane::Completion done) {
          transport_->all_reduce(Channel::kScatter, outgoing, job->plan.layout.wire, std::move(done));
        }));
  }

  slot.free =
      unpack_lane_->run(summed, stage(job, "unpack", chunk, [this, job, chunk, result] {
                          device_->unpack({job->plan.layout, chunk, result.data, job->plan.unpack_scale, job->streams});
                        }));
  return slot.free;
}

void Engine::finish(const std::shared_ptr<BucketJob>& job, std::exception_ptr error) {
  // A chunk before the last may have failed: the bucket is good only if nothing ever did.
  if (!error) error = failure_->get();
  if (!error) {
    const auto now = Clock::now();
    std::lock_guard<std::mutex> lock(mutex_);
    const double busy_ms = elapsed_ms(std::max(job->submitted, last_done_), now);
    last_done_ = now;
    stats_.busy_ms += busy_ms;
    step_busy_ms_ += busy_ms;
    stats_.num_buckets += 1;
    stats_.grad_nbytes += job->grad_nbytes;
    stats_.sent_nbytes += sent_nbytes(job->plan, world_size());
    stats_.num_nonfinite += job->num_nonfinite;
    if (job->is_last) {
      push_recent(&stats_.recent_exposed_ms, stats_.num_steps, elapsed_ms(job->submitted, now));
      push_recent(&stats_.recent_busy_ms, stats_.num_steps, step_busy_ms_);
      stats_.num_steps += 1;
      step_busy_ms_ = 0;
    }
  }
  job->on_done(error);
}

Lane::Task Engine::stage(const std::shared_ptr<BucketJob>& job, const char* name, int64_t chunk, Lane::Task body) {
  return [failure = failure_, job, name, chunk, body = std::move(body)] {
    try {
      body();
    } catch (...) {
      std::rethrow_exception(failure->fail(*job, name, chunk, std::current_exception()));
    }
  };
}

Lane::Transfer Engine::wire_stage(const std::shared_ptr<BucketJob>& job, const char* name, int64_t chunk,
                                  Lane::Transfer body) {
  return [failure = failure_, job, name, chunk, body = std::move(body)](Lane::Completion done) {
    try {
      body([failure, job, name, chunk, done = std::move(done)](std::exception_ptr cause) {
        done(cause ? failure->fail(*job, name, chunk, cause) : nullptr);
      });
    } catch (...) {
      std::rethrow_exception(failure->fail(*job, name, chunk, std::current_exception()));
    }
  };
}

EngineStats Engine::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

}  // namespace fusedcomm
