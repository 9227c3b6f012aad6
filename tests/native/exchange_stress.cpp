// Runs exchanges under a sanitizer: several ranks in one process, over a backend of threads that has random delays and
// behaves like gloo. There are four scenes: all messages arrive; a rank is lost while messages to it and from it are
// half read; a rank fails because another one is silent; channels are closed with exchanges under way.
#include <unistd.h>

#include <atomic>
#include <future>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>

#include "require.h"
#include "transport/exchange.h"

using namespace fusedcomm;

namespace {

using namespace std::chrono_literals;

constexpr int kNumRanks = 3;
constexpr auto kTimeout = 12s;

// A message for which a send, a receive, or both have been posted.
struct Letter {
  std::mutex mutex;
  std::condition_variable changed;
  at::Tensor from, to;
  bool arrived = false, lost = false;
  std::set<const void*> aborted;  // the Works whose wait must return because of abort()
};

class Work : public c10d::Work {
 public:
  explicit Work(std::shared_ptr<Letter> letter) : letter_(std::move(letter)) {}

  // Like gloo's: returns false, once, if abort() has ended the wait. The message may still arrive after that.
  bool wait(std::chrono::milliseconds timeout) override {
    std::unique_lock<std::mutex> lock(letter_->mutex);
    const auto limit = timeout == kNoTimeout ? std::chrono::milliseconds(kTimeout) : timeout;
    const bool ended = letter_->changed.wait_for(
        lock, limit, [this] { return letter_->arrived || letter_->lost || letter_->aborted.count(this) != 0; });
    if (letter_->lost) throw std::runtime_error("Connection closed by peer");
    if (letter_->aborted.erase(this) != 0) return false;
    if (letter_->arrived) return true;
    if (!ended) throw std::runtime_error("Timed out waiting");
    return true;
  }

  void abort() override {
    std::lock_guard<std::mutex> lock(letter_->mutex);
    letter_->aborted.insert(this);
    letter_->changed.notify_all();
  }

 private:
  const std::shared_ptr<Letter> letter_;
};

// Moves letters between ranks.
class Post {
 public:
  Post() : thread_([this] { carry(); }) {}
  ~Post() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  c10::intrusive_ptr<c10d::Work> hand_over(int from, int to, int tag, const at::Tensor& bytes, bool is_sent) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<Letter>& letter = letters_[{from, to, tag}];
    if (!letter) letter = std::make_shared<Letter>();
    const auto work = c10::make_intrusive<Work>(letter);
    std::lock_guard<std::mutex> its_lock(letter->mutex);
    // Like gloo, it fails every message that is begun after the loss.
    if (from == lost_ || to == lost_) throw std::runtime_error("Connection closed by peer");
    (is_sent ? letter->from : letter->to) = bytes;
    if (letter->from.defined() && letter->to.defined()) {
      ready_.push_back(letter);
      letters_.erase({from, to, tag});
      changed_.notify_all();
    }
    return work;
  }

  // Loses a rank. Only messages that have not begun to arrive fail. As in gloo, a wait for a half-read message gets no
  // error.
  void lose(int rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    lost_ = rank;
    for (auto& [key, letter] : letters_) {
      const auto& [from, to, tag] = key;
      if (from != rank && to != rank) continue;
      if (tag != 0 && tag % 2 == 0) continue;  // half read
      std::lock_guard<std::mutex> its_lock(letter->mutex);
      letter->lost = true;
      letter->changed.notify_all();
    }
  }

 private:
  void carry() {
    std::mt19937 random(1);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !ready_.empty(); });
      if (stopping_) return;
      // The order is random: letters of different tags may overtake each other.
      const size_t index = random() % ready_.size();
      const std::shared_ptr<Letter> letter = ready_[index];
      ready_.erase(ready_.begin() + static_cast<std::ptrdiff_t>(index));
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 100));
      {
        std::lock_guard<std::mutex> its_lock(letter->mutex);
        std::memcpy(letter->to.data_ptr(), letter->from.data_ptr(), static_cast<size_t>(letter->to.numel()));
        letter->from = letter->to = at::Tensor();
        letter->arrived = true;
        letter->changed.notify_all();
      }
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::tuple<int, int, int>, std::shared_ptr<Letter>> letters_;
  std::vector<std::shared_ptr<Letter>> ready_;
  int lost_ = -1;
  bool stopping_ = false;
  std::thread thread_;
};

class Backend : public c10d::Backend {
 public:
  Backend(int rank, std::shared_ptr<Post> post) : c10d::Backend(rank, kNumRanks), post_(std::move(post)) {}
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    return post_->hand_over(rank_, to, tag, tensors[0], true);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    return post_->hand_over(from, rank_, tag, tensors[0], false);
  }

 private:
  const std::shared_ptr<Post> post_;
  const c10::intrusive_ptr<Options> options_ = c10::make_intrusive<Options>("stress", kTimeout);
};

struct Buffer {
  explicit Buffer(int64_t nbytes) : bytes(std::make_shared<std::vector<std::byte>>(static_cast<size_t>(nbytes))) {}
  WireSpan span() const { return {bytes->data(), static_cast<int64_t>(bytes->size()), bytes}; }
  std::shared_ptr<std::vector<std::byte>> bytes;
};

std::byte value(int from, int to, int number) { return static_cast<std::byte>(from * 61 + to * 17 + number * 7); }

// The text of an exchange's error; empty if there was none. The text is taken on the thread on which the exchange ends:
// an exception counts its owners inside the C++ library, where the sanitizer does not see it.
using Ended = std::future<std::string>;

std::string text_of(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  }
}

// Starts an exchange of `nbytes` for each rank. The exchange owns its buffers.
Ended start(Exchange* exchange, int rank, int number, int64_t nbytes, Buffer* received) {
  Buffer sent(kNumRanks * nbytes);
  for (int to = 0; to < kNumRanks; ++to) {
    std::fill_n(sent.bytes->begin() + to * nbytes, nbytes, value(rank, to, number));
  }
  *received = Buffer(kNumRanks * nbytes);
  auto promise = std::make_shared<std::promise<std::string>>();
  Ended ended = promise->get_future();
  exchange->start(sent.span(), received->span(),
                  [promise](std::exception_ptr error) { promise->set_value(text_of(error)); });
  return ended;
}

void on_all_ranks(const std::function<void(int rank, const BackendPtr& backend, Post& post)>& body) {
  const auto post = std::make_shared<Post>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    threads.emplace_back([&, rank] { body(rank, c10::make_intrusive<Backend>(rank, post), *post); });
  }
  for (std::thread& thread : threads) thread.join();
}

void steady(int max_sending) {
  constexpr int kNumExchanges = 120, kUnderWay = 8;
  on_all_ranks([max_sending](int rank, const BackendPtr& backend, Post&) {
    Exchange exchange(backend, max_sending);
    std::vector<Buffer> received(kUnderWay, Buffer(0));
    std::vector<Ended> ended(kUnderWay);
    const auto check = [&](int number) {
      const auto slot = static_cast<size_t>(number % kUnderWay);
      REQUIRE(ended[slot].get().empty(), "exchange %d failed on rank %d", number, rank);
      const int64_t nbytes = 1 + number * 37;
      for (int from = 0; from < kNumRanks; ++from) {
        for (int64_t i = 0; i < nbytes; ++i) {
          REQUIRE((*received[slot].bytes)[static_cast<size_t>(from * nbytes + i)] == value(from, rank, number),
                  "exchange %d, rank %d: byte %ld of rank %d's part", number, rank, static_cast<long>(i), from);
        }
      }
    };
    for (int number = 0; number < kNumExchanges; ++number) {
      const auto slot = static_cast<size_t>(number % kUnderWay);
      if (number >= kUnderWay) check(number - kUnderWay);
      ended[slot] = start(&exchange, rank, number, 1 + number * 37, &received[slot]);
    }
    for (int number = kNumExchanges - kUnderWay; number < kNumExchanges; ++number) check(number);
  });
}

// A rank is lost before it starts an exchange that the other ranks have started. The others' exchange fails, and so do
// the exchanges behind it, well before the timeout.
void lost(int max_sending) {
  for (int num_before = 0; num_before < 3; ++num_before) {
    on_all_ranks([max_sending, num_before](int rank, const BackendPtr& backend, Post& post) {
      Exchange exchange(backend, max_sending);
      std::vector<Buffer> received(8, Buffer(0));
      for (int number = 0; number < num_before; ++number) {
        const std::string error = start(&exchange, rank, number, 100, &received[0]).get();
        REQUIRE(error.empty(), "exchange %d failed on rank %d", number, rank);
      }
      if (rank == kNumRanks - 1) {
        std::this_thread::sleep_for(50ms);
        post.lose(rank);
        return;
      }
      std::vector<Ended> ended;
      for (Buffer& buffer : received) ended.push_back(start(&exchange, rank, num_before, 100, &buffer));
      for (Ended& one : ended) {
        REQUIRE(one.wait_for(kTimeout / 2) == std::future_status::ready, "rank %d still waits for the lost one", rank);
        const std::string error = one.get();
        REQUIRE(error.rfind("between this rank and rank 2: ", 0) == 0, "rank %d says: %s", rank, error.c_str());
      }
    });
  }
}

// One rank starts no exchange, and another rank fails because of that. Rank 0 waits for the silent rank either first or
// last; its error must name both ranks.
void cascade(int max_sending) {
  for (int failing = 1; failing < kNumRanks; ++failing) {
    on_all_ranks([max_sending, failing](int rank, const BackendPtr& backend, Post& post) {
      const int silent = kNumRanks - failing;
      Exchange exchange(backend, max_sending);
      std::vector<Buffer> received(2, Buffer(0));
      const std::string none = start(&exchange, rank, 0, 100, &received[0]).get();
      REQUIRE(none.empty(), "the exchange failed on rank %d: %s", rank, none.c_str());
      if (rank == silent) std::this_thread::sleep_for(kTimeout / 2 + 1s);  // keeps its channel open meanwhile
      if (rank == failing) {
        std::this_thread::sleep_for(kTimeout / 2);
        post.lose(rank);
      }
      if (rank != 0) return;
      const std::string error = start(&exchange, rank, 1, 100, &received[1]).get();
      const auto named = [&error](int peer) {
        return error.find("between this rank and rank " + std::to_string(peer) + ": ") != std::string::npos;
      };
      REQUIRE(named(failing) && named(silent), "rank 0 says: %s", error.c_str());
    });
  }
}

// Channels are closed at various moments. Exchanges that cannot complete end with an error, and no exchange is left
// without an end.
void closed(int max_sending) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    std::atomic<int> num_failed{0};
    on_all_ranks([max_sending, &num_failed, repeat](int rank, const BackendPtr& backend, Post&) {
      std::vector<Buffer> received(12, Buffer(0));
      std::vector<Ended> ended;
      {
        Exchange exchange(backend, max_sending);
        // The last rank begins only some of them.
        const int num_begun = rank == kNumRanks - 1 ? repeat % 5 : 12;
        for (int number = 0; number < num_begun; ++number) {
          ended.push_back(start(&exchange, rank, number, 1000, &received[static_cast<size_t>(number)]));
        }
        std::this_thread::sleep_for(std::chrono::microseconds(300 * repeat));
      }
      for (Ended& one : ended) {
        REQUIRE(one.wait_for(0s) == std::future_status::ready, "rank %d: the channel left an exchange behind", rank);
        if (!one.get().empty()) ++num_failed;
      }
    });
    REQUIRE(num_failed >= 2 * (12 - 4), "only %d exchanges noticed", num_failed.load());
  }
}

}  // namespace

int main() {
  const std::pair<const char*, void (*)(int)> scenes[] = {
      {"steady", steady}, {"lost", lost}, {"cascade", cascade}, {"closed", closed}};
  for (const auto& [name, scene] : scenes) {
    alarm(120);  // ends a hang
    const auto begin = std::chrono::steady_clock::now();
    for (const int max_sending : {0, 2}) scene(max_sending);
    std::printf("exchange_stress: %s: %.1f s\n", name,
                std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    std::fflush(stdout);
  }
  return 0;
}
