#include "gradients/parameters.h"

#include <c10/core/GradMode.h>

#include <utility>

namespace fusedcomm {
namespace {

// Counts in one allocation of the device's memory.
constexpr int64_t kNumCounts = 4096;

// Throws ValueError if a state names a parameter that is not ours and cannot appear later.
void check_name(const std::string& name, bool is_ours, bool may_turn_up) {
  TORCH_CHECK_VALUE(is_ours || may_turn_up, "fusedcomm: the state has a parameter '", name,
                    "', which this model does not have: load a state of this model");
}

}  // namespace

at::Tensor ParameterState::left_out() const {
  if (loaded.defined() || !residual) return loaded;
  return residual->values(residual_begin, numel());
}

Parameters::Parameters(const std::vector<Known>& known, int wire_1d, c10::Device device, Device* codec)
    : are_known_(!known.empty()), wire_1d_(wire_1d), device_(device), codec_(codec) {
  for (const Known& parameter : known) {
    add(parameter.tensor, parameter.name, parameter.wire);
  }
  if (codec_->counts_in_memory()) add_counts();  // not in the first pass, because the host waits
}

const ParameterStatePtr& Parameters::add(const at::Tensor& parameter, std::string name, int wire) {
  auto state = std::make_shared<ParameterState>();
  state->parameter = parameter;
  state->name = std::move(name);
  state->number = next_number_++;
  state->wire = wire;
  return states_.emplace(parameter.unsafeGetTensorImpl(), std::move(state)).first->second;
}

const ParameterStatePtr& Parameters::state_of(const at::Tensor& parameter) {
  const auto known = states_.find(parameter.unsafeGetTensorImpl());
  if (known != states_.end()) return known->second;
  return add_new(parameter, c10::str("parameter ", next_number_, " of shape ", parameter.sizes()), wire_of(parameter));
}

void Parameters::know(const at::Tensor& parameter, std::string name, int wire) {
  if (!knows(parameter)) add_new(parameter, std::move(name), wire);
}

const ParameterStatePtr& Parameters::add_new(const at::Tensor& parameter, std::string name, int wire) {
  const ParameterStatePtr& state = add(parameter, std::move(name), wire);
  const auto waiting = waiting_residuals_.find(state->name);
  if (waiting != waiting_residuals_.end() && waiting->second.numel() == state->numel()) {
    state->loaded = waiting->second;
    waiting_residuals_.erase(waiting);
  }
  if (auto found = waiting_of_encoders_.extract(state->name)) state->of_encoders = std::move(found.mapped());
  const auto count = waiting_counts_.find(state->name);
  if (count != waiting_counts_.end()) {
    state->num_nonfinite = count->second;
    waiting_counts_.erase(count);
  }
  return state;
}

std::unordered_map<std::string, ParameterState*> Parameters::by_name() const {
  std::unordered_map<std::string, ParameterState*> by_name;
  for (const auto& [impl, state] : states_) by_name.emplace(state->name, state.get());
  return by_name;
}

std::map<std::string, at::Tensor> Parameters::residuals(const std::optional<ParameterNames>& names) const {
  c10::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> residuals;
  for (const auto& [impl, state] : states_) {
    if (names && names->count(state->name) == 0) continue;
    const at::Tensor left_out = state->left_out();
    if (left_out.defined()) residuals[state->name] = left_out.clone();
  }
  for (const auto& [name, waiting] : waiting_residuals_) {
    if (!names || names->count(name) != 0) residuals[name] = waiting.clone();
  }
  return residuals;
}

std::map<std::string, EncoderResiduals> Parameters::residuals_of_encoders() const {
  std::map<std::string, EncoderResiduals> found(waiting_of_encoders_.begin(), waiting_of_encoders_.end());
  std::unordered_map<const ResidualBuffer*, const ParameterState*> first_of;
  for (const auto& [impl, state] : states_) {
    if (state->of_encoders) found[state->name] = *state->of_encoders;
    if (state->loaded.defined() || !state->residual) continue;
    const ParameterState*& first = first_of[state->residual.get()];
    if (first == nullptr || state->residual_begin < first->residual_begin) first = state.get();
  }
  for (const auto& [buffer, first] : first_of) {
    if (auto of_encoders = buffer->of_encoders()) found[first->name] = std::move(*of_encoders);
  }
  return found;
}

void Parameters::restore_residuals(const std::map<std::string, at::Tensor>& residuals,
                                   const std::optional<ParameterNames>& names,
                                   const std::map<std::string, EncoderResiduals>& of_encoders) {
  const auto by_name = this->by_name();
  for (const auto& [name, values] : residuals) {
    const auto found = by_name.find(name);
    check_name(name, found != by_name.end(), !are_known_);
    if (found == by_name.end()) continue;
    const int64_t numel = found->second->numel();
    TORCH_CHECK_VALUE(values.numel() == numel, "fusedcomm: the state's residual of '", name, "' has ", values.numel(),
                      " elements, the parameter ", numel);
  }
  for (const auto& [impl, state] : states_) {
    if (names && names->count(state->name) == 0) continue;
    state->loaded = at::Tensor();
    state->residual = nullptr;
    state->of_encoders.reset();
  }
  if (!names) waiting_residuals_.clear();
  if (!names) waiting_of_encoders_.clear();
  for (const std::string& name : names.value_or(ParameterNames{})) waiting_residuals_.erase(name);
  for (const auto& [name, values] : residuals) {
    const auto found = by_name.find(name);
    at::Tensor& loaded = found == by_name.end() ? waiting_residuals_[name] : found->second->loaded;
    loaded = values.detach().to(device_, at::kFloat, /*non_blocking=*/false, /*copy=*/true).reshape({-1});
  }
  for (const auto& [name, each] : of_encoders) {
    const auto found = by_name.find(name);
    auto loaded = each;
    for (at::Tensor* values : {&std::get<0>(loaded), &std::get<1>(loaded)}) {
      *values = values->detach().to(device_, /*non_blocking=*/false, /*copy=*/true).flatten();
    }
    if (found != by_name.end())
      found->second->of_encoders = std::move(loaded);
    else
      waiting_of_encoders_[name] = std::move(loaded);
  }
}

std::string Parameters::drop_unclaimed_residuals() {
  if (waiting_residuals_.empty()) return "";
  const std::string notice =
      c10::str("fusedcomm: the loaded state has residuals of ", waiting_residuals_.size(),
               " parameters that this model does not have, for example of '", waiting_residuals_.begin()->first,
               "'. They are dropped. A CommState without module=model identifies parameters by their order and shape "
               "only: give it the model to load a state that was saved by fusedcomm.attach or by a CommState with "
               "the model");
  waiting_residuals_.clear();
  waiting_of_encoders_.clear();
  return notice;
}

std::map<std::string, int64_t> Parameters::nonfinite() {
  take_device_counts();
  std::map<std::string, int64_t> counts;
  for (const auto& [impl, state] : states_) {
    if (state->num_nonfinite != 0) counts[state->name] = state->num_nonfinite;
  }
  counts.insert(waiting_counts_.begin(), waiting_counts_.end());
  return counts;
}

void Parameters::restore_nonfinite(const std::map<std::string, int64_t>& counts) {
  take_device_counts();
  const auto by_name = this->by_name();
  for (const auto& [name, count] : counts) check_name(name, by_name.count(name) != 0, !are_known_);
  for (const auto& [name, count] : counts) {
    const auto found = by_name.find(name);
    if (found == by_name.end()) {
      waiting_counts_[name] = count;
    } else {
      found->second->num_nonfinite = count;
    }
  }
}

void Parameters::add_counts() {
  counts_.push_back(codec_->allocate(kNumCounts * static_cast<int64_t>(sizeof(int64_t))));
  for (int64_t i = 0; i < kNumCounts; ++i) spare_.push_back({counts_.size() * kNumCounts - 1 - i});
}

int64_t* Parameters::count_of(ParameterState* state) {
  if (!state->on_device) {
    if (spare_.empty()) add_counts();
    state->on_device = spare_.back();
    spare_.pop_back();
  }
  const size_t index = state->on_device->index;
  return reinterpret_cast<int64_t*>(counts_[index / kNumCounts].get()) + index % kNumCounts;
}

int64_t Parameters::take_device_counts() {
  std::vector<int64_t> now;
  for (const auto& block : counts_) {
    const auto of_block = codec_->read_counts(reinterpret_cast<const int64_t*>(block.get()), kNumCounts);
    now.insert(now.end(), of_block.begin(), of_block.end());
  }
  for (const auto& [impl, state] : states_) {
    if (!state->on_device) continue;
    DeviceCount& count = *state->on_device;
    const int64_t more = now[count.index] - std::exchange(count.taken, now[count.index]);
    num_nonfinite_on_device_ += more;
    state->num_nonfinite += more;
  }
  return num_nonfinite_on_device_;
}

}  // namespace fusedcomm
