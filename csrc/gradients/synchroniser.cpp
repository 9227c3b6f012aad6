#include "gradients/synchroniser.h"

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <cmath>
#include <new>
#include <numeric>
#include <tuple>
#include <utility>

#include "gradients/grad_dtype.h"
#include "gradients/passthrough.h"
#include "gradients/profiled_bucket.h"
#include "transport/error_text.h"
#include "wire/names.h"

namespace fusedcomm {

Synchroniser::Synchroniser(std::shared_ptr<Engine> engine, std::shared_ptr<C10dTransport> transport,
                           const std::vector<Parameters::Known>& parameters, c10::Device device, const Options& options)
    : engine_(std::move(engine)),
      transport_(std::move(transport)),
      options_(options),
      device_(device),
      process_(getpid()),
      parameters_(parameters, options.wire_1d, device),
      monitor_(options.monitor, engine_.get(), transport_.get()) {}

Synchroniser::~Synchroniser() {
  // Ending these joins threads. Such a thread may be releasing a tensor that Python refers to, which takes the GIL.
  const auto end = [this] {
    if (getpid() != process_) {
      // A child of fork() does not have the threads that would be joined.
      new auto(std::make_tuple(std::move(watch_), std::move(engine_), std::move(transport_)));
      return;
    }
    watch_.reset();
    if (engine_->has_failed()) transport_->give_up();
    engine_.reset();
    transport_.reset();
  };
  if (PyGILState_Check()) {
    pybind11::gil_scoped_release no_gil;
    end();
  } else {
    end();
  }
}

void Synchroniser::watch(const StorePtr& store, const WatchOptions& options) {
  TORCH_CHECK(!watch(), "fusedcomm: this engine has a watch already: call unwatch() first");
  const auto watch = std::make_shared<Watch>(engine_->board(), engine_->shared_device(), store, options);
  // The pointer is weak, because transfers that outlive the engine may still fail.
  engine_->explain_failures_with([weak = std::weak_ptr<Watch>(watch)](const std::string& failure) {
    const auto alive = weak.lock();
    return alive ? alive->explain(failure) : std::string();
  });
  std::lock_guard<std::mutex> lock(watch_mutex_);
  watch_ = watch;
}

void Synchroniser::unwatch() {
  std::unique_lock<std::mutex> lock(watch_mutex_);
  const std::shared_ptr<Watch> watch = std::move(watch_);
  watch_ = nullptr;
  lock.unlock();
  if (watch) watch->stop();
}

std::shared_ptr<Watch> Synchroniser::watch() const {
  std::lock_guard<std::mutex> lock(watch_mutex_);
  return watch_;
}

void Synchroniser::stop(const std::string& reason) {
  // Stop the watch first: a failure may be waiting for its explanation.
  if (const auto watch = this->watch()) watch->stop();
  engine_->stop(reason);
}

void Synchroniser::leave(const std::string& reason) {
  transport_->give_up();
  stop(reason);
}

void Synchroniser::rethrow_named(const Bucket& bucket, const std::exception& error) {
  // Callers may catch errors on a CPU, and out-of-memory errors, by their type: rethrow these unchanged.
  if (device_.is_cpu() || dynamic_cast<const c10::OutOfMemoryError*>(&error)) throw;
  const std::string cause = error_text(error);
  if (cause.rfind("fusedcomm: ", 0) == 0) throw;
  TORCH_CHECK(false, "fusedcomm: rank ", engine_->rank(), " of ", engine_->world_size(), ": the hand-over of ",
              text_of(bucket), " in step ", step(), " failed: ", cause);
}

std::string Synchroniser::text_of(const Bucket& bucket) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> names;
  for (const at::Tensor& parameter : bucket.parameters) names.push_back(parameters_.state_of(parameter)->name);
  return make_label(bucket.index, names, static_cast<double>(bucket.gradients->nbytes()))->text;
}

FuturePtr Synchroniser::run(const Bucket& bucket) try {
  engine_->device().check_caller();
  const GradientsPtr& gradients = bucket.gradients;
  const size_t index = bucket.index;
  const bool is_alone = bucket.is_alone;
  if (index == 0 && !is_alone && monitor_.verifies()) begin_pass();
  std::unique_lock<std::mutex> lock(mutex_);
  const auto record = record_of(bucket);
  if (!is_alone) check_order(bucket, *record);
  const int64_t pass = num_passes_;
  const size_t num_buckets = num_buckets_;  // in the pass before
  const int64_t step = count(bucket);
  lock.unlock();
  PassEpilogue::Task epilogue;
  if (!is_alone) epilogue = epilogue_.begin_bucket(index, bucket.is_last, bucket.parameters);

  auto future = make_future(device_);
  auto job = make_job(record, gradients, step);
  job->is_last = bucket.is_last;
  job->profiler = profiler_of_this_thread(*transport_, device_, record->plan, *gradients);
  if (record->passthrough) {
    submit_passthrough(std::move(job), gradients, future, epilogue.unscale);
    return future;
  }
  for (const at::Tensor& tensor : gradients->tensors()) engine_->device().will_use(tensor);
  job->owner = std::const_pointer_cast<Gradients>(gradients);
  job->on_done = [future, gradients](std::exception_ptr error) {
    complete(*future, gradients->front(), std::move(error));
  };
  if (monitor_.is_measured(pass)) measure(job.get(), record, gradients, pass);
  if (!is_alone && monitor_.is_verified(pass, index, num_buckets) && !record->plan.in_place) {
    monitor_.submit_verified(std::move(job), gradients, pass, record, epilogue.unscale);
  } else {
    if (epilogue.sums_squares || epilogue.unscale != 1) add_epilogue(job, *record, gradients, index, epilogue);
    engine_->submit(std::move(job));
  }
  return future;
} catch (const std::exception& error) {
  // Preparing a bucket sometimes waits for the device, and then receives errors of earlier work.
  rethrow_named(bucket, error);
}

int64_t Synchroniser::count(const Bucket& bucket) {
  const int64_t step = step_;
  if (!bucket.is_last && !bucket.is_alone) return step;
  ++step_;
  ++num_passes_;
  if (bucket.is_alone) return step;
  num_buckets_ = bucket.index + 1;
  // Every parameter has appeared by the end of a pass. DDP's second pass may only have them in other buckets.
  if (std::string notice = parameters_.drop_unclaimed_residuals(); !notice.empty())
    notices_.push_back(std::move(notice));
  return step;
}

void Synchroniser::choose_wires(WireOf wire_of) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::swap(wire_of_, wire_of);  // the old one may need the GIL to end, so it ends after the lock
}

void Synchroniser::know(const at::Tensor& parameter, const std::string& name) {
  WireOf wire_of;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (parameters_.knows(parameter)) return;
    wire_of = wire_of_;
  }
  const int wire = wire_of ? wire_of(name, parameter.dim()) : parameters_.wire_of(parameter);
  std::lock_guard<std::mutex> lock(mutex_);
  parameters_.know(parameter, name, wire);
}

void Synchroniser::forget(const at::Tensor& parameter) {
  std::lock_guard<std::mutex> lock(mutex_);
  parameters_.forget(parameter);
}

void Synchroniser::add_epilogue(const std::shared_ptr<BucketJob>& job, const BucketRecord& record,
                                const GradientsPtr& gradients, size_t index, const PassEpilogue::Task& task) {
  Device& device = engine_->device();
  const bool sums_squares = task.sums_squares && device.has_epilogue();
  if (record.plan.unpacks()) {
    job->unscale = task.unscale;
    if (sums_squares) job->squares.resize(job->payloads.size() * static_cast<size_t>(job->num_chunks()));
  } else if (device.has_epilogue()) {
    if (sums_squares) job->squares.resize(job->payloads.size());
    // The job owns the function.
    job->after_unpack = [&device, own = job.get(), unscale = task.unscale] {
      for (size_t i = 0; i < own->payloads.size(); ++i) {
        double* const squares = own->squares.empty() ? nullptr : &own->squares[i];
        device.finish_in_place(own->payloads[i].streams, {unscale, squares});
      }
    };
  } else if (task.unscale != 1) {
    job->after_unpack = [gradients, unscale = task.unscale] { gradients->scale(unscale); };
  }
  if (!sums_squares) return;
  job->on_done = [this, own = job.get(), index, pass = task.pass,
                  on_done = std::move(job->on_done)](std::exception_ptr error) {
    epilogue_.set_squares(pass, index, std::accumulate(own->squares.begin(), own->squares.end(), 0.0));
    on_done(std::move(error));
  };
}

void Synchroniser::submit_passthrough(std::shared_ptr<BucketJob> job, const GradientsPtr& gradients,
                                      const FuturePtr& future, float unscale) {
  // Read when the job is done: a sparse bucket then has another tensor.
  auto result = std::make_shared<at::Tensor>(gradients->front());
  job->owner = std::make_shared<std::pair<GradientsPtr, std::shared_ptr<at::Tensor>>>(gradients, result);
  job->on_done = [future, result](std::exception_ptr error) { complete(*future, *result, std::move(error)); };
  if (gradients->is_sparse()) {
    for (const at::Tensor& part : {result->_indices(), result->_values()}) engine_->device().will_use(part);
    TORCH_WARN_ONCE("fusedcomm: ", job->label->text, " is sparse and is summed exactly, uncompressed");
  } else {
    for (const at::Tensor& tensor : gradients->tensors()) engine_->device().will_use(tensor);
  }
  PassthroughStages stages =
      gradients->is_sparse() ? sparse_stages(transport_, *result, result) : dense_stages(transport_, gradients);
  if (unscale != 1) {
    stages.unpack = [unpack = std::move(stages.unpack), result, gradients, unscale] {
      if (unpack) unpack();
      at::NoGradGuard no_grad;
      if (gradients->is_sparse()) {
        result->_values().mul_(unscale);
      } else {
        gradients->scale(unscale);
      }
    };
  }
  // On streams, an intermediate tensor's memory goes back to the stream that made it. One stream must therefore make
  // and use all of them.
  if (!device_.is_cpu()) stages = on_wire_lane(std::move(stages));
  engine_->submit_passthrough(std::move(job), std::move(stages));
}

void Synchroniser::begin_pass() {
  std::unique_lock<std::mutex> lock(mutex_);
  const int64_t pass = num_passes_;
  lock.unlock();
  for (const ErrorMonitor::Failing& failing : monitor_.begin_pass(pass)) fall_back(failing);
  std::string notice = monitor_.take_notice(pass);
  if (notice.empty() || transport_->rank() != 0) return;
  lock.lock();
  notices_.push_back(std::move(notice));
}

void Synchroniser::fall_back(const ErrorMonitor::Failing& failing) {
  const int to = options_.fallback_wire;
  const Wire wire = to == kExactWire ? Wire::kFp32 : wire_format(engine_->config(), to).wire;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& record : records_) {
    // A bucket that has been rebuilt since is verified again later.
    if (!record || record->parameters != failing.record->parameters) continue;
    bool changes = false;
    for (const BucketRecord::Member& member : record->members) {
      const int from = member.state->wire;
      if (from == kExactWire || exactness(wire_format(engine_->config(), from).wire) >= exactness(wire)) continue;
      member.state->wire = to;
      changes = true;
    }
    if (!changes) continue;
    const auto label = record->label;
    record = nullptr;
    if (transport_->rank() != 0) continue;
    const std::string off = std::isinf(failing.relative_error)
                                ? "is NaN or Inf where the exact mean is finite, or the reverse, an infinite error, "
                                : c10::str("has a relative error of ", failing.relative_error, ", ");
    notices_.push_back(c10::str("fusedcomm: the mean of ", label->text, " ", off, "more than Fallback(error=",
                                options_.monitor.fallback_error, ") allows, in step ", failing.pass,
                                ": its parameters are sent in ", wire_name(wire), " from now on, on every rank"));
  }
}

std::shared_ptr<BucketJob> Synchroniser::make_job(const std::shared_ptr<const BucketRecord>& record,
                                                  const GradientsPtr& gradients, int64_t step) const {
  auto job = std::make_shared<BucketJob>();
  job->label = record->label;
  if (record->passthrough) return job;
  job->grad_nbytes = gradients->nbytes();
  job->plan = BucketPlanPtr(record, &record->plan);
  job->on_nonfinite = [record, gradients](const BucketJob& packed, int64_t chunk) {
    attribute_nonfinite(*record, *gradients, packed, chunk);
  };
  const WireConfig& config = engine_->config();
  // Addresses are taken for each job, because gradients may be allocated at every backward pass.
  std::byte* const origin = gradients->origin();
  job->payloads.reserve(record->streams.size());
  for (const BucketRecord::Payload& stream : record->streams) {
    Payload payload;
    payload.streams.origin = origin;
    payload.streams.tables = stream.tables;
    if (record->plan.sums_codes() && config.stochastic) {
      const auto host = static_cast<uint32_t>(transport_->place().host);
      const NoiseKey noise{config.seed, stream.first_parameter, static_cast<uint32_t>(step), 0};
      Encoding& first = first_encoding(*record, &payload);
      first.stochastic = payload.reduce.stochastic = true;
      first.noise = payload.reduce.noise = noise;
      first.noise.source =
          record->plan.on_two_levels() ? kFirstHostSource + host : static_cast<uint32_t>(transport_->rank());
      payload.reduce.noise.source = kReducerSource;
    }
    if (stream.residual) {
      first_encoding(*record, &payload).residual = stream.residual->of_first();
      payload.reduce.residual = stream.residual->of_second();
    }
    job->payloads.push_back(std::move(payload));
  }
  const GradDtype dtype = grad_dtype_of(record->dtype);
  for (size_t i = 0; i < record->members.size(); ++i) {
    const BucketRecord::Member& member = record->members[i];
    BucketSlices& streams = job->payloads[member.payload].streams;
    SliceList& stream = member.exact ? streams.exact : streams.lossy;
    stream.append(origin + gradients->places()[i].offset * grad_nbytes(dtype), member.numel, dtype);
  }
  for (size_t i = 0; i < record->streams.size(); ++i) {
    if (!record->streams[i].unpack_tables) continue;
    job->payloads[i].unpacked = job->payloads[i].streams;
    job->payloads[i].unpacked->tables = record->streams[i].unpack_tables;
  }
  return job;
}

std::shared_ptr<const BucketRecord> Synchroniser::record_of(const Bucket& bucket) {
  const size_t index = bucket.index;
  if (records_.size() <= index) records_.resize(index + 1);
  auto& record = records_[index];
  if (!record || !record->is_of(bucket) || !record->has_residuals()) {
    record = make_record(bucket, *engine_, transport_->place(), device_, &parameters_);
    monitor_.forget(record->label->name);
    // Parameters may have come from records that are kept, whose residuals would only take memory.
    for (auto& other : records_) {
      if (bucket.is_alone && other && !other->has_residuals()) other = nullptr;
    }
  } else if (!record->lies_as(*bucket.gradients)) {
    record = moved_record(*record, *bucket.gradients, &engine_->device(), &parameters_);
  }
  // Records past the last bucket are from before a rebuild.
  if (bucket.is_last && !bucket.is_alone) records_.resize(index + 1);
  return records_[index];
}

void Synchroniser::check_order(const Bucket& bucket, const BucketRecord& record) {
  const size_t index = bucket.index;
  // If a reducer skips buckets, passes cannot be told apart here, and the number of the pass selects the noise.
  const char* const why =
      ": DDP leaves out buckets that no rank has used, as with skip_all_reduce_unused_params=True, and fusedcomm needs "
      "all of them: make the DDP module without that option. (If a backward pass was interrupted instead, make the DDP "
      "module again.)";
  TORCH_CHECK(index <= next_index_, "fusedcomm: ", bucket_name(index), " was handed over where ",
              bucket_name(next_index_), " was expected", why);
  // In static_graph's first pass all buckets have the index 0 and none is the last: accept one unfinished pass.
  if (index == 0) {
    const bool is_again = next_index_ != 0 && first_of_pass_ == &record;
    num_unfinished_ = is_again ? num_unfinished_ + 1 : 0;
    TORCH_CHECK(num_unfinished_ < 2, "fusedcomm: ", bucket_name(0), " was handed over repeatedly, without ",
                bucket_name(next_index_), " and those after it", why);
    first_of_pass_ = &record;
  }
  next_index_ = bucket.is_last ? 0 : index + 1;
}

EngineStats Synchroniser::stats() const {
  EngineStats stats = engine_->stats();
  std::lock_guard<std::mutex> lock(mutex_);
  stats.num_nonfinite += parameters_.take_device_counts();
  return stats;
}

void Synchroniser::settle() const {
  std::lock_guard<std::mutex> lock(mutex_);
  parameters_.take_device_counts();
}

int64_t Synchroniser::step() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return step_;
}

void Synchroniser::restore_step(int64_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  step_ = step;
}

std::map<std::string, at::Tensor> Synchroniser::residuals() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return parameters_.residuals();
}

void Synchroniser::restore_residuals(const std::map<std::string, at::Tensor>& residuals) {
  std::lock_guard<std::mutex> lock(mutex_);
  parameters_.restore_residuals(residuals);
  // The next backward pass makes residuals of the loaded values. The records themselves stay: the other ranks, which
  // have loaded nothing, may be about to fall back because of one of them.
  for (auto& record : records_) {
    if (!record) continue;
    const auto stale = std::make_shared<BucketRecord>(*record);
    stale->is_stale = true;
    for (BucketRecord::Payload& stream : stale->streams) stream.residual = nullptr;
    record = stale;
  }
}

std::map<std::string, int64_t> Synchroniser::nonfinite_by_parameter() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return parameters_.nonfinite();
}

void Synchroniser::restore_nonfinite(const std::map<std::string, int64_t>& counts) {
  std::lock_guard<std::mutex> lock(mutex_);
  parameters_.restore_nonfinite(counts);
}

void Synchroniser::adopt_names(const Synchroniser& other) {
  std::unique_lock<std::mutex> their_lock(other.mutex_);
  const std::vector<ParameterStatePtr> theirs = other.parameters_.states();
  their_lock.unlock();
  std::lock_guard<std::mutex> lock(mutex_);
  parameters_.adopt_names(theirs);
}

std::vector<std::string> Synchroniser::take_notices() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(notices_, {});
}

std::vector<std::shared_ptr<const BucketRecord>> Synchroniser::buckets() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return records_;
}

}  // namespace fusedcomm
