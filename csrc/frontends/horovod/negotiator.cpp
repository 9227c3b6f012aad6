#include "frontends/horovod/negotiator.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace fusedcomm::horovod {
namespace {

// Names beyond these are negotiated by their signatures, so that a script that makes up a name for each call does not
// fill the memory.
constexpr size_t kMaxIds = 1 << 16;
// Begins the names of requests that have none.
const std::string kNoName = "noname.";

// Upper bound of the bytes of a request's elements; what is fused has one dtype.
int64_t nbytes_of(const Signature& signature) { return signature.numel() * 4; }

// What every member must know of the others' requests.
std::vector<int64_t> rows_of(const Signature& signature) {
  if (signature.kind == Kind::kAlltoall) return signature.splits;
  std::vector<int64_t> rows;
  if (signature.kind != Kind::kAllgather) return rows;
  for (const TensorMeta& tensor : signature.tensors) rows.push_back(tensor.shape.empty() ? 1 : tensor.shape.front());
  return rows;
}

}  // namespace

Negotiator::Negotiator(int size, const NegotiatorOptions& options, Send send, Say say, std::function<bool(int)> is_busy)
    : size_(size),
      options_(options),
      send_(std::move(send)),
      say_(std::move(say)),
      is_busy_(std::move(is_busy)),
      joined_(static_cast<size_t>(size)) {}

void Negotiator::add_set(int number, std::vector<int> ranks, double now_s) {
  Set set;
  set.ranks = std::move(ranks);
  sets_[number] = std::move(set);
  const auto early = early_.find(number);
  if (early == early_.end()) return;
  const auto messages = std::move(early->second);
  early_.erase(early);
  for (const auto& [rank, ready] : messages) on_ready(rank, ready, now_s);
}

void Negotiator::remove_set(int set) { sets_.erase(set); }

size_t Negotiator::member(const Set& set, int rank) {
  return static_cast<size_t>(std::find(set.ranks.begin(), set.ranks.end(), rank) - set.ranks.begin());
}

Negotiator::Set* Negotiator::find(int set) {
  const auto found = sets_.find(set);
  return found == sets_.end() ? nullptr : &found->second;
}

void Negotiator::on_ready(int rank, const Ready& ready, double now_s) {
  if (has_ended_) return;
  Set* const set = find(ready.set);
  if (!set) {
    early_[ready.set].emplace_back(rank, ready);
    return;
  }
  for (const Ready::Entry& entry : ready.entries) add(*set, rank, entry, now_s);
}

void Negotiator::add(Set& set, int rank, const Ready::Entry& entry, double now_s) {
  const Signature& signature = entry.id == kNoId ? entry.signature : signatures_.at(entry.id);
  if (signature.kind == Kind::kJoin) {
    join(set, rank);
    return;
  }
  const std::string key = signature.key();
  Pending& pending = set.pending[key];
  const size_t num_members = set.ranks.size();
  if (pending.has.empty()) {
    pending.first = signature;
    pending.first_rank = rank;
    pending.has.resize(num_members);
    pending.since_s = now_s;
    const auto known = set.ids.find(key);
    if (known != set.ids.end() && signatures_[known->second] == signature) pending.id = known->second;
  }
  if (pending.problem.empty() && !signature.problem.empty()) {
    pending.problem = "fusedcomm: rank " + std::to_string(rank) + " cannot take part: " + signature.problem;
  } else if (pending.problem.empty()) {
    pending.problem = mismatch(pending.first, pending.first_rank, signature, rank);
  }
  const size_t index = member(set, rank);
  if (index >= num_members) return;
  pending.has[index] = true;
  if (auto rows = rows_of(signature); !rows.empty()) {
    pending.of_members.resize(num_members);
    pending.of_members[index] = std::move(rows);
  }
  look_whether_ready(set, key, pending);
}

void Negotiator::join(Set& set, int rank) {
  joined_[static_cast<size_t>(rank)] = true;
  for (auto& [number, other] : sets_) look_at_all(other);
  if (std::find(joined_.begin(), joined_.end(), false) != joined_.end()) return;
  joined_.assign(joined_.size(), false);
  Response response;
  response.number = rank;
  Response::Entry entry;
  entry.is_new = true;
  entry.signature.kind = Kind::kJoin;
  entry.signature.name = "noname";
  response.entries.push_back(std::move(entry));
  send_to_all(set, Execute{0, {std::move(response)}}.message());
}

void Negotiator::look_at_all(Set& set) {
  for (auto& [key, pending] : set.pending) look_whether_ready(set, key, pending);
}

void Negotiator::look_whether_ready(Set& set, const std::string& key, Pending& pending) {
  if (pending.is_ready) return;
  bool lacks_joined = false;
  for (size_t i = 0; i < set.ranks.size(); ++i) {
    if (pending.has[i]) continue;
    if (!joined_[static_cast<size_t>(set.ranks[i])]) return;
    lacks_joined = true;
  }
  const Signature& first = pending.first;
  if (lacks_joined && pending.problem.empty() && first.kind != Kind::kAllreduce) {
    pending.problem = "fusedcomm: " + key + " needs every rank, and " + missing_text(set, pending) +
                      " joined already. After a join() the other ranks may only call allreduce";
  }
  pending.is_ready = true;
  set.ready.push_back(key);
  set.ready_nbytes += nbytes_of(first);
}

std::string Negotiator::missing_text(const Set& set, const Pending& pending) const {
  std::ostringstream text;
  int count = 0;
  for (size_t i = 0; i < set.ranks.size(); ++i) {
    if (!pending.has[i]) text << (count++ != 0 ? ", " : "") << set.ranks[i];
  }
  return (count == 1 ? "rank " : "ranks ") + text.str();
}

void Negotiator::emit() {
  if (has_ended_) return;
  for (auto& [number, set] : sets_) {
    if (set.ready.empty()) continue;
    if (is_busy_(number) && set.ready_nbytes < options_.fusion_nbytes) continue;
    emit(number, set);
  }
}

void Negotiator::emit(int number, Set& set) {
  Execute execute;
  execute.set = number;
  struct Open {
    const Signature* first;
    size_t response;
    int64_t nbytes;
  };
  std::vector<Open> open;
  std::vector<Signature> kept;  // Open points into it
  kept.reserve(set.ready.size());
  const std::vector<std::string> ready = std::exchange(set.ready, {});
  set.ready_nbytes = 0;
  for (const std::string& key : ready) {
    Pending& pending = set.pending.at(key);
    kept.push_back(pending.first);
    const Signature& first = kept.back();
    Response response = response_of(set, key, pending);
    const bool is_good = response.error.empty();
    set.pending.erase(key);
    const int64_t nbytes = nbytes_of(first);
    const auto fits = std::find_if(open.begin(), open.end(), [&](const Open& bucket) {
      return is_good && bucket.first->fuses_with(first) && bucket.nbytes + nbytes <= options_.fusion_nbytes;
    });
    if (fits != open.end()) {
      execute.responses[fits->response].entries.push_back(std::move(response.entries.front()));
      fits->nbytes += nbytes;
      continue;
    }
    if (is_good) open.push_back({&first, execute.responses.size(), nbytes});
    execute.responses.push_back(std::move(response));
  }
  send_to_all(set, execute.message());
}

Response Negotiator::response_of(Set& set, const std::string& key, Pending& pending) {
  Response response;
  response.error = pending.problem;
  Response::Entry entry;
  entry.id = pending.id;
  entry.of_members = pending.of_members;
  const Signature& first = pending.first;
  if (response.error.empty() && entry.id == kNoId && first.may_have_id() && signatures_.size() < kMaxIds &&
      first.name.compare(0, kNoName.size(), kNoName) != 0) {
    entry.id = static_cast<Id>(signatures_.size());
    signatures_.push_back(first);
    set.ids[key] = entry.id;
    entry.is_new = true;
  }
  if (entry.id == kNoId) entry.is_new = true;
  if (!response.error.empty()) {
    entry.id = kNoId;
    entry.is_new = true;
  }
  if (entry.is_new) entry.signature = first;
  response.entries.push_back(std::move(entry));
  return response;
}

void Negotiator::end(const std::string& why) {
  if (std::exchange(has_ended_, true)) return;
  for (int rank = 0; rank < size_; ++rank) send_(rank, text_message(MessageType::kEnd, why));
}

void Negotiator::send_to_all(const Set& set, const std::string& message) const {
  // Rank 0 last: what it does on its own message must not come before the others' messages.
  for (auto rank = set.ranks.rbegin(); rank != set.ranks.rend(); ++rank) send_(*rank, message);
}

double Negotiator::next_look_s(double now_s) const {
  double next = -1;
  const auto at = [&](double since_s, double after_s) {
    if (after_s <= 0) return;
    const double left = std::max(0.0, since_s + after_s - now_s);
    next = next < 0 ? left : std::min(next, left);
  };
  for (const auto& [number, set] : sets_) {
    for (const auto& [key, pending] : set.pending) {
      if (!pending.was_reported) at(pending.since_s, options_.stall_warning_s);
      at(pending.since_s, options_.stall_shutdown_s);
    }
  }
  return next;
}

void Negotiator::look_for_stalls(double now_s) {
  std::string fatal;
  for (auto& [number, set] : sets_) {
    std::vector<std::pair<std::string, std::string>> lines;  // what misses, names
    for (auto& [key, pending] : set.pending) {
      if (pending.is_ready) continue;
      const double age_s = now_s - pending.since_s;
      const bool ends = options_.stall_shutdown_s > 0 && age_s >= options_.stall_shutdown_s;
      if (options_.stall_warning_s > 0 && age_s >= options_.stall_warning_s && !pending.was_reported) {
        pending.was_reported = true;
        lines.emplace_back(missing_text(set, pending), key);
      }
      if (ends && fatal.empty()) fatal = missing_text(set, pending) + " did not submit " + key;
    }
    std::map<std::string, std::vector<std::string>> by_missing;
    for (auto& [missing, key] : lines) by_missing[missing].push_back(key);
    for (const auto& [missing, keys] : by_missing) {
      std::ostringstream text;
      text << "fusedcomm: for " << options_.stall_warning_s << " s the other ranks have waited for " << missing
           << ", which did not submit ";
      for (size_t i = 0; i < keys.size() && i < 8; ++i) text << (i != 0 ? ", " : "") << keys[i];
      if (keys.size() > 8) text << ", … (" << keys.size() << ")";
      text << ". Every rank must submit the same names; see whether that rank runs, and what it does";
      say_(text.str());
    }
  }
  if (!fatal.empty()) {
    std::ostringstream text;
    text << "fusedcomm: within HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=" << options_.stall_shutdown_s << " " << fatal;
    end(text.str());
  }
}

}  // namespace fusedcomm::horovod
