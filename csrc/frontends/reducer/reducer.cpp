#include "frontends/reducer/reducer.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <numeric>
#include <utility>

#include "transport/error_text.h"

namespace fusedcomm {
namespace {

constexpr size_t kNoBucket = SIZE_MAX;
std::vector<size_t> counted(size_t size) {
  std::vector<size_t> numbers(size);
  std::iota(numbers.begin(), numbers.end(), size_t{0});
  return numbers;
}

}  // namespace

// The engine copies a callback, and drops it without a call if the backward pass fails.
class GradReducer::TaskEnd {
 public:
  using End = std::function<void(GradReducer&, bool)>;
  TaskEnd(std::weak_ptr<GradReducer> reducer, End end) : reducer_(std::move(reducer)), end_(std::move(end)) {}
  ~TaskEnd() {
    const auto reducer = reducer_.lock();
    if (reducer && !has_ended_) end_(*reducer, false);
  }
  TaskEnd(const TaskEnd&) = delete;
  TaskEnd& operator=(const TaskEnd&) = delete;
  void call() {
    has_ended_ = true;
    if (const auto reducer = reducer_.lock()) end_(*reducer, true);
  }

 private:
  const std::weak_ptr<GradReducer> reducer_;
  const End end_;
  std::atomic<bool> has_ended_{false};
};

GradReducer::UnderWay::~UnderWay() {
  try {
    for (const BucketGradient& gradient : gradients) {
      if (used_by && !gradient.tensor.is_sparse()) used_by->will_use(gradient.tensor);
    }
  } catch (const std::exception&) {  // the device has failed, and does nothing more
  }
}

std::shared_ptr<GradReducer> GradReducer::make(std::shared_ptr<Synchronizer> synchronizer,
                                               std::vector<Parameter> parameters, const Options& options,
                                               StorePtr store, Say say) {
  std::shared_ptr<GradReducer> reducer(
      new GradReducer(std::move(synchronizer), std::move(parameters), options, std::move(store), std::move(say)));
  reducer->add_hooks();
  return reducer;
}

GradReducer::GradReducer(std::shared_ptr<Synchronizer> synchronizer, std::vector<Parameter> parameters,
                         const Options& options, StorePtr store, Say say)
    : parameters_(std::move(parameters)),
      options_(options),
      say_(std::move(say)),
      is_accelerated_(!parameters_.empty() && !parameters_.front().tensor.is_cpu()),
      rank_(synchronizer ? synchronizer->engine().rank() : 0),
      world_size_(synchronizer ? synchronizer->engine().world_size() : 1),
      synchronizer_(std::move(synchronizer)),
      problem_(std::move(store)),
      passes_(options.steps ? options.steps->passes : 1),
      num_parameters_(static_cast<int64_t>(parameters_.size())),
      passes_left_(parameters_.size(), passes_),
      kinds_(parameters_.size(), 0),
      caps_(options.caps),
      order_(counted(parameters_.size())),
      trained_(parameters_.size()),
      used_(parameters_.size()) {}

void GradReducer::add_hooks() {
  std::vector<at::Tensor> tensors;
  for (const Parameter& parameter : parameters_) tensors.push_back(parameter.tensor);
  accumulators_ =
      std::make_unique<Accumulators>(tensors, [weak = weak_from_this()](size_t index, const at::Tensor& added) {
        if (const auto reducer = weak.lock()) reducer->on_gradient(index, added);
      });
}

void GradReducer::on_gradient(size_t index, const at::Tensor& added) {
  std::unique_lock<std::mutex> lock(mutex_);
  const at::Tensor& parameter = parameters_[index].tensor;
  // autograd adds nothing to the gradient of a parameter that has been frozen since the forward pass.
  if (!accumulators_ || !parameter.requires_grad()) return;
  if (options_.steps) return on_gradient_of_step(lock, index, added);
  if (parameter.grad().defined()) used_.set(index);
  if (!is_synchronizing()) {
    if (!refuses_local_passes_) return;
    TORCH_CHECK(failure_.empty(), failure_);
    fail(c10::str(rank_text(), "a backward pass outside of no_sync() brought the gradient of ", parameters_[index].name,
                  " past the DataParallel, so each rank would have its own. Call the DataParallel, not its module, and "
                  "backward() on what it returns. For gradients that stay on this rank: within no_sync()"));
  }
  TORCH_CHECK(failure_.empty(), failure_);
  if (!in_pass_) {
    call_before_pass(lock);
    begin_pass();
  }
  follow_task([pass = pass_](GradReducer& reducer, bool has_ended) {
    has_ended ? reducer.on_task_end(pass) : reducer.on_task_lost(pass);
  });
  const size_t bucket = bucket_of_[index];
  if (bucket == kNoBucket) return;
  if (has_arrived_[index]) {
    fail(c10::str(rank_text(), "the gradient of ", parameters_[index].name,
                  " has arrived twice in one backward pass. With reentrant checkpointing a parameter must not be used "
                  "in two checkpoints: use torch.utils.checkpoint.checkpoint(…, use_reentrant=False). Or the backward "
                  "pass before this one left out parameters within a reentrant checkpoint"));
  }
  arrive(index, added);
}

void GradReducer::arrive(size_t index, const at::Tensor& added) {
  const size_t bucket = bucket_of_[index];
  has_arrived_[index] = true;
  arrival_.push_back(index);
  if (--num_missing_[bucket] == 0 && bucket == under_way_.size()) hand_over_complete(added);
}

void GradReducer::on_task_end(int64_t pass) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!in_pass_ || pass != pass_ || !accumulators_) return;
  if (has_parameters_left()) {
    // Called within a node, this is the end of a backward pass that a reentrant checkpoint has begun. The outer one
    // goes on.
    if (torch::autograd::get_current_node()) return;
    if (!options_.find_unused) fail(missing_text());
    std::fill(num_missing_.begin(), num_missing_.end(), 0);
    hand_over_complete(at::Tensor());
  }
  finish_pass(lock);
  say_notices(lock);
}

void GradReducer::say_notices(std::unique_lock<std::mutex>& lock) {
  std::vector<std::string> notices = std::exchange(notices_, {});
  for (std::string& notice : synchronizer_->take_notices()) notices.push_back(std::move(notice));
  lock.unlock();
  if (!notices.empty()) say_(notices);
}

void GradReducer::on_task_lost(int64_t pass) try {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!in_pass_ || pass != pass_ || !failure_.empty()) return;
  failure_ = c10::str(rank_text(),
                      "its backward pass ended with an error after gradients had been sent, so the ranks "
                      "no longer agree what comes next. Call detach() and make a new GradReducer");
  problem_.publish(failure_);
} catch (const std::exception&) {  // a destructor calls this
}

void GradReducer::call_before_pass(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  try {
    observer_.begin();
    lock.lock();
    const std::shared_ptr<Synchronizer> synchronizer = synchronizer_;
    lock.unlock();
    synchronizer->begin_pass();
  } catch (const std::exception& error) {
    lock.lock();
    if (failure_.empty()) {  // else give_up() has told why
      failure_ = c10::str(rank_text(), "between two backward passes: ", error.what());
      problem_.publish(failure_);
    }
    throw;
  }
  lock.lock();
}

void GradReducer::begin_pass(Part part) {
  part_ = part;
  Flags trained = look_at_parameters();
  check_flags();
  if (must_agree_on_order_) {
    agree_on_order();
    buckets_.clear();
  }
  if (options_.steps) {
    trained.add(trained_.words().data());
    for (const size_t index : ready_) trained.set(index);
    if (holds_) learn_sparse();
  }
  if (buckets_.empty() || trained != trained_) {
    if (taker_ && !buckets_.empty()) refuse_other_parameters(trained);
    must_compare_ = trained != trained_ && !membership_;
    trained_ = std::move(trained);
    cut_buckets();
  }
  ++pass_;
  in_pass_ = true;
  has_arrived_.assign(parameters_.size(), false);
  arrival_.clear();
  under_way_.clear();
  tasks_.clear();
  num_missing_.clear();
  num_expected_ = 0;
  for (const auto& bucket : buckets_) {
    num_missing_.push_back(bucket.size());
    num_expected_ += bucket.size();
  }
  send_flags();
}

Flags GradReducer::trained_now() const {
  Flags trained(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].tensor.requires_grad()) trained.set(i);
  }
  return trained;
}

Flags GradReducer::look_at_parameters() {
  Flags trained = trained_now();
  if (const std::string lost = lost_text(); !lost.empty()) fail(rank_text() + lost);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const std::string other = accumulators_->taken_by(i);
    if (!other.empty()) {
      fail(c10::str(rank_text(), other, " synchronizes the parameter ", parameters_[i].name,
                    ", too, and its gradient would be averaged twice: give each parameter to one of them"));
    }
  }
  return trained;
}

std::string GradReducer::lost_text() const {
  for (size_t i = parameters_.size(); i-- > 0;) {  // the model's first parameter is the last here
    const at::Tensor& tensor = parameters_[i].tensor;
    if (!tensor.requires_grad() || accumulators_->sees(i, tensor)) continue;
    return c10::str("the gradient of ", parameters_[i].name,
                    " no longer comes to the reducer, so it would not be synchronized: another dtype or device, or a "
                    "parametrization, takes hooks away. (It is now ",
                    tensor.scalar_type(), " on ", tensor.device(),
                    ".) Change the model before it is wrapped: make the GradReducer or DataParallel again, on every "
                    "rank");
  }
  return "";
}

Buckets GradReducer::cut_for(const std::vector<size_t>& order, const Flags& trained) const {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    const int64_t group = group_of_.empty() ? -1 : group_of_[i];
    pieces.push_back({tensor.scalar_type(), static_cast<int64_t>(tensor.nbytes()), sends_sparse(i), group});
  }
  std::vector<size_t> members;
  std::copy_if(order.begin(), order.end(), std::back_inserter(members), [&](size_t i) { return trained[i]; });
  return cut(pieces, members, caps_);
}

void GradReducer::cut_buckets() {
  buckets_ = cut_for(order_, trained_);
  bucket_of_.assign(parameters_.size(), kNoBucket);
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    for (const size_t index : buckets_[bucket]) bucket_of_[index] = bucket;
  }
}

void GradReducer::follow_task(std::function<void(GradReducer&, bool)> on_end) {
  const int task = torch::autograd::get_current_graph_task_id();
  if (std::find(tasks_.rbegin(), tasks_.rend(), task) != tasks_.rend()) return;
  tasks_.push_back(task);
  at_task_end(std::move(on_end));
}

void GradReducer::at_task_end(std::function<void(GradReducer&, bool)> on_end) {
  const auto end = std::make_shared<TaskEnd>(weak_from_this(), std::move(on_end));
  torch::autograd::Engine::get_default_engine().queue_callback([end] { end->call(); });
}

void GradReducer::hand_over_complete(const at::Tensor& added) {
  // Gloo ends the process of a rank that receives more bytes than it expects.
  if (std::exchange(must_compare_, false)) check_flags();
  while (under_way_.size() < buckets_.size() && num_missing_[under_way_.size()] == 0) {
    hand_over(under_way_.size(), added);
  }
}

void GradReducer::hand_over(size_t bucket, const at::Tensor& added) {
  const std::vector<size_t>& members = buckets_[bucket];
  UnderWay under_way;
  std::vector<at::Tensor> parameters, tensors;
  for (const size_t index : members) {
    under_way.gradients.push_back(gradient_of(index, added));
    parameters.push_back(parameters_[index].tensor);
    tensors.push_back(under_way.gradients.back().tensor);
  }
  try {
    if (taker_) {
      taker_->take(members, tensors);
      under_way_.push_back(std::move(under_way));
      return;
    }
    GradientsPtr gradients;
    if (tensors.front().is_sparse()) {
      const SlicePlace place{0, parameters.front().numel() * (parameters.front().is_complex() ? 2 : 1)};
      gradients = std::make_shared<const Gradients>(tensors.front(), std::vector<SlicePlace>{place});
    } else {
      gradients = std::make_shared<const Gradients>(std::move(tensors));
    }
    const bool is_last = bucket + 1 == buckets_.size();
    OfPass of_pass;
    of_pass.is_shadow = part_ == Part::kZeros;
    of_pass.is_kept = true;
    if (is_accelerated_) under_way.used_by = synchronizer_->engine().shared_device();
    of_pass.factor = options_.steps && options_.steps->sums ? world_size_ : 1;
    under_way.future =
        synchronizer_->run(Bucket(bucket, is_last, std::move(parameters), std::move(gradients), std::move(of_pass)));
  } catch (const std::exception& error) {
    fail(c10::str(rank_text(), "the hand-over of bucket ", bucket, " failed: ", error_text(error)));
  }
  under_way_.push_back(std::move(under_way));
}

BucketGradient GradReducer::gradient_of(size_t index, const at::Tensor& added) {
  const Parameter& parameter = parameters_[index];
  const at::Tensor& gradient = parameter.tensor.grad();
  if (gradient.defined() && gradient.is_sparse() && !parameter.is_sparse && !options_.steps) {
    fail(c10::str(rank_text(), "the gradient of ", parameter.name,
                  " is sparse. Only an Embedding or EmbeddingBag with sparse=True may have sparse gradients, and the "
                  "GradReducer must be given the module, not its parameters, to know it"));
  }
  if (gradient.defined() && gradient.scalar_type() != parameter.tensor.scalar_type()) {
    fail(c10::str(rank_text(), "the gradient of ", parameter.name, " is ", gradient.scalar_type(),
                  " and the parameter is ", parameter.tensor.scalar_type(), ": they must have the same dtype"));
  }
  if (part_ == Part::kZeros) return zero_gradient(parameter.tensor, sends_sparse(index) ? sparse_dims(index) : 0);
  // If no rank has used it, its gradient stays as it was.
  const bool is_kept = !options_.steps && !has_arrived_[index];
  BucketGradient of_bucket =
      bucket_gradient(parameter.tensor, sends_sparse(index) ? sparse_dims(index) : 0, is_kept, added);
  num_copied_ += of_bucket.is_copy && !of_bucket.tensor.is_sparse();
  // The copy's stream may be another than the one that waits, and nobody orders them as optimizers do for gradients.
  if (of_bucket.is_copy && !of_bucket.tensor.is_sparse() && !taker_) {
    synchronizer_->engine().device().will_use(of_bucket.tensor);
  }
  return of_bucket;
}

void GradReducer::finish_pass(std::unique_lock<std::mutex>& lock) {
  membership_ ? wait_for_members(lock) : wait_for_pass();
  if (!taker_ && part_ == Part::kGradients) write_back_all();
  observer_.end();
  note_order();
  const std::vector<size_t> used = taker_ ? parameters_used() : std::vector<size_t>();
  used_.clear();
  under_way_.clear();
  in_pass_ = false;
  if (std::exchange(is_on_once_, false)) is_on_ = false;
  if (!taker_) return;
  const auto end = taker_->end;
  lock.unlock();
  end(used);
  lock.lock();
}

void GradReducer::write_back_all() {
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    const UnderWay& under_way = under_way_[bucket];
    for (size_t i = 0; i < buckets_[bucket].size(); ++i) {
      const size_t index = buckets_[bucket][i];
      const BucketGradient& gradient = under_way.gradients[i];
      if (!gradient.is_copy) {
        mark_written(parameters_[index].tensor);
      } else if (!options_.find_unused || used_[index]) {
        const bool is_sparse = gradient.tensor.is_sparse();
        write_back(parameters_[index].tensor, is_sparse ? under_way.future->value().toTensor() : gradient.tensor,
                   sparse_dims(index));
      }
    }
  }
}

std::vector<size_t> GradReducer::order_of_arrival() const {
  std::vector<size_t> order = arrival_;
  std::copy_if(order_.begin(), order_.end(), std::back_inserter(order), [this](size_t i) { return !has_arrived_[i]; });
  return order;
}

void GradReducer::note_order() {
  if (membership_ || taker_) return;
  if (pass_ == 0) {
    must_agree_on_order_ = true;  // on every rank
    return;
  }
  if (rank_ != 0 || buckets_.size() == 1) return;
  wants_new_order_ = arrival_order_.note(arrival_, [this](const std::vector<size_t>&) {
    Buckets now = buckets_, others = cut_for(order_of_arrival(), trained_);
    for (Buckets* buckets : {&now, &others}) {
      for (auto& bucket : *buckets) std::sort(bucket.begin(), bucket.end());
    }
    return now == others;
  });
}

}  // namespace fusedcomm
