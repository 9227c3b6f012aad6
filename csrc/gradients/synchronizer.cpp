#include "gradients/synchronizer.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <new>
#include <thread>
#include <tuple>

#include "gradients/decorators.h"
#include "gradients/job_builder.h"
#include "transport/error_text.h"
#include "transport/without_gil.h"

namespace fusedcomm {
namespace {

// Between two looks whether the device has reached a point.
constexpr std::chrono::microseconds kDevicePoll{20};
// For a thread that enqueues collectives when they are to be aborted.
constexpr std::chrono::seconds kAbortAfter{1};

}  // namespace

Synchronizer::Synchronizer(std::shared_ptr<Engine> engine, std::shared_ptr<TensorTransport> transport,
                           const std::vector<Parameters::Known>& parameters, c10::Device device, int wire_1d)
    : engine_(std::move(engine)),
      transport_(std::move(transport)),
      device_(device),
      process_(getpid()),
      parameters_(parameters, wire_1d, device, &engine_->device()),
      records_(*engine_, transport_->place(), device),
      weights_(engine_.get(), device),
      kept_(device) {}

Synchronizer::~Synchronizer() {
  const WithoutGil no_gil;
  if (getpid() != process_) {
    // A child of fork() does not have the threads that would be joined.
    new auto(std::make_tuple(std::move(watched_), std::move(engine_), std::move(transport_)));
    return;
  }
  unwatch();
  if (engine_->has_failed()) transport_->give_up();
  engine_.reset();
  transport_.reset();
}

std::shared_ptr<Watched> Synchronizer::watch(Watched::Seconds limit) {
  TORCH_CHECK(!watched(), "fusedcomm: this engine has a watch already: call unwatch() first");
  const auto watched = std::make_shared<Watched>(engine_->board(), engine_->shared_device(), limit);
  // The pointer is weak, because transfers that outlive the engine may still fail.
  engine_->explain_failures_with([weak = std::weak_ptr<Watched>(watched)](const std::string& failure) {
    const WithoutGil no_gil;  // the watch needs it
    const auto alive = weak.lock();
    return alive ? alive->explain(failure) : std::string();
  });
  std::lock_guard<std::mutex> lock(watch_mutex_);
  watched_ = watched;
  return watched;
}

void Synchronizer::unwatch() {
  std::lock_guard<std::mutex> lock(watch_mutex_);
  if (watched_) watched_->end();
  watched_ = nullptr;
}

std::string Synchronizer::explain(const std::string& failure) const {
  const auto watched = this->watched();
  return watched ? watched->explain(failure) : std::string();
}

std::shared_ptr<Watched> Synchronizer::watched() const {
  std::lock_guard<std::mutex> lock(watch_mutex_);
  return watched_;
}

void Synchronizer::stop(const std::string& reason) {
  // End the watch first: a failure may be waiting for its explanation.
  if (const auto watched = this->watched()) watched->end();
  engine_->stop(reason);
}

void Synchronizer::leave(const std::string& reason) {
  transport_->give_up();
  stop(reason);
}

void Synchronizer::abort(const std::string& reason) {
  stop(reason);  // first: wait_for_device() tells by it what has ended before
  // A backend must not enqueue and abort at once. One that does not come back waits for what is to be aborted.
  engine_->wait_for_callers(kAbortAfter);
  transport_->abort();
}

bool Synchronizer::wait_for_device() const {
  if (device_.is_cpu()) return true;
  const StampPtr end = engine_->device().stamp();
  while (!end->reached()) {
    if (engine_->has_ended()) return false;
    std::this_thread::sleep_for(kDevicePoll);
  }
  return !engine_->has_ended();
}

void Synchronizer::wait_until_idle(std::chrono::milliseconds timeout) const {
  if (device_.is_cpu()) return;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (const StampPtr& end : engine_->ends()) {
    while (!end->reached()) {
      TORCH_CHECK(std::chrono::steady_clock::now() < deadline, "fusedcomm: rank ", engine_->rank(), " of ",
                  engine_->world_size(), ": ", device_,
                  " still runs what was enqueued before the ranks changed, after ", timeout.count(),
                  " ms, although its collectives were aborted. Start this process again, to join");
      std::this_thread::sleep_for(kDevicePoll);
    }
  }
}

void Synchronizer::rethrow_named(const Bucket& bucket, const std::exception& error) {
  // Callers may catch errors on a CPU, and out-of-memory errors, by their type: rethrow these unchanged.
  if (device_.is_cpu() || dynamic_cast<const c10::OutOfMemoryError*>(&error)) throw;
  const std::string cause = error_text(error);
  if (cause.rfind("fusedcomm: ", 0) == 0) throw;
  TORCH_CHECK(false, "fusedcomm: rank ", engine_->rank(), " of ", engine_->world_size(), ": the hand-over of ",
              text_of(bucket), " in step ", step(), " failed: ", cause);
}

std::string Synchronizer::text_of(const Bucket& bucket) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> names;
  for (const at::Tensor& parameter : bucket.parameters) names.push_back(parameters_.state_of(parameter)->name);
  return make_label(bucket.index, names, static_cast<double>(bucket.gradients->nbytes()))->text;
}

void Synchronizer::before_every(int64_t every, std::function<void()> call) {
  call_every_ = every;
  call_ = std::move(call);
}

void Synchronizer::begin_pass() {
  const int64_t num_ended = num_begun_++;
  if (call_every_ == 0 || num_ended == 0 || num_ended % call_every_ != 0) return;
  engine_->device().check_caller();  // first: a graph capture would record the work of the call, or fail because of it
  call_();
}

FuturePtr Synchronizer::run(const Bucket& bucket) try {
  engine_->device().check_caller();
  const PassWeightPtr weight = bucket.gathers() ? nullptr : weights_.of(bucket);
  if (weight && weight->pack == 0) bucket.gradients->zero();  // also what is not finite
  const BucketRecordPtr record = take_turn(bucket, weight.get());

  const FuturePtr future = make_future(device_);
  std::shared_ptr<BucketJob> job = make_job(bucket, record, *engine_, future);
  job->profiled = profiled_range(*transport_, device_, *job->plan, *bucket.gradients);
  if (record->passthrough) {
    submit_passthrough(std::move(job), bucket, weight, &weights_, future, engine_.get(), transport_);
    return future;
  }
  // Residuals are remembered before weights change them.
  if (record->messages) job->decorators.push_back(remembered(record));
  if (weight) job->decorators.push_back(weighted(job.get(), bucket, *record, weight, &weights_, engine_.get()));
  if (record->messages) keep(bucket, record, job, future);
  engine_->submit(std::move(job));
  return future;
} catch (const std::exception& error) {
  // Preparing a bucket sometimes waits for the device, and then receives errors of earlier work.
  rethrow_named(bucket, error);
}

void Synchronizer::keep(const Bucket& bucket, const BucketRecordPtr& record, const std::shared_ptr<BucketJob>& job,
                        const FuturePtr& future) {
  KeptMessages& messages = *record->messages;
  if (messages.means_before) std::swap(messages.means, messages.means_before);
  job->kept = std::make_shared<KeptMessages>(messages);
  if (const BucketRecordPtr packed = bucket.of_pass() ? bucket.of_pass()->packed : nullptr) {
    move_codes(*packed, record->plan, *engine_, device_, job->kept.get());
    job->is_packed = true;
  }
  kept_.note({bucket, record, job, future});
}

void Synchronizer::take_over(Synchronizer& from, bool again) {
  std::map<std::string, at::Tensor> residuals = from.residuals();
  const auto nonfinite = from.nonfinite_by_parameter();
  engine_->begin_stats_with(from.engine_->stats());
  weights_.take_over(from.weights_);
  std::unique_lock<std::mutex> their_lock(from.mutex_);
  const int64_t step = from.order_.step() - (again ? 1 : 0);
  their_lock.unlock();
  std::lock_guard<std::mutex> lock(mutex_);
  order_.restore_step(step);
  parameters_.restore_nonfinite(nonfinite);
  if (!residuals.empty()) parameters_.restore_residuals(residuals, std::nullopt);
}

BucketRecordPtr Synchronizer::take_turn(const Bucket& bucket, const PassWeight* weight) {
  std::lock_guard<std::mutex> lock(mutex_);
  BucketRecordPtr record = records_.of(bucket, weight, &parameters_);
  order_.take(bucket, record.get());
  if (bucket.ends_pass()) {
    // Every parameter has appeared by the end of a pass. DDP's second pass may only have them in other buckets.
    std::string notice = parameters_.drop_unclaimed_residuals();
    if (!notice.empty()) notices_.push_back(std::move(notice));
  }
  return record;
}

void Synchronizer::choose_wires(WireOf wire_of) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::swap(wire_of_, wire_of);  // the old one may need the GIL to end, so it ends after the lock
}

void Synchronizer::know(const at::Tensor& parameter, const std::string& name, std::optional<int> wire) {
  WireOf wire_of;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (parameters_.knows(parameter)) return;
    wire_of = wire_of_;
  }
  if (!wire) wire = wire_of ? wire_of(name, parameter.dim()) : parameters_.wire_of(parameter);
  std::lock_guard<std::mutex> lock(mutex_);
  parameters_.know(parameter, name, *wire);
}

EngineStats Synchronizer::stats() const {
  EngineStats stats = engine_->stats();
  engine_->device().wait_for_lanes();
  std::lock_guard<std::mutex> lock(mutex_);
  stats.num_nonfinite += parameters_.take_device_counts();
  return stats;
}

int64_t Synchronizer::step() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return order_.step();
}

void Synchronizer::restore_step(int64_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  order_.restore_step(step);
}

std::map<std::string, at::Tensor> Synchronizer::residuals(const std::optional<ParameterNames>& names) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return parameters_.residuals(names);
}

std::map<std::string, EncoderResiduals> Synchronizer::residuals_of_encoders() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return parameters_.residuals_of_encoders();
}

void Synchronizer::restore_residuals(const std::map<std::string, at::Tensor>& residuals,
                                     const std::optional<ParameterNames>& names,
                                     const std::map<std::string, EncoderResiduals>& of_encoders) {
  std::lock_guard<std::mutex> lock(mutex_);
  parameters_.restore_residuals(residuals, names, of_encoders);
  // The next backward pass makes residuals of the loaded values.
  records_.make_stale();
}

std::map<std::string, int64_t> Synchronizer::nonfinite_by_parameter() const {
  engine_->device().wait_for_lanes();
  std::lock_guard<std::mutex> lock(mutex_);
  return parameters_.nonfinite();
}

void Synchronizer::restore_nonfinite(const std::map<std::string, int64_t>& counts) {
  engine_->device().wait_for_lanes();
  std::lock_guard<std::mutex> lock(mutex_);
  parameters_.restore_nonfinite(counts);
}

std::vector<std::string> Synchronizer::take_notices() {
  std::string of_weights = weights_.take_notice();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!of_weights.empty() && transport_->rank() == 0) notices_.push_back(std::move(of_weights));
  return std::exchange(notices_, {});
}

std::vector<BucketRecordPtr> Synchronizer::buckets() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return records_.all();
}

}  // namespace fusedcomm
