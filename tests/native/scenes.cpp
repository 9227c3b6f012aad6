// Runs a scene. If it fails or hangs, its name and its seed are printed.
#include "scenes.h"

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "require.h"
#include "sim_accelerator.h"

namespace {

char failing_scene[200];

void tell_failure(int signal) {
  const char* const how = signal == SIGALRM ? "hangs: " : "fails: ";
  if (write(STDERR_FILENO, how, std::strlen(how)) >= 0 &&
      write(STDERR_FILENO, failing_scene, std::strlen(failing_scene)) >= 0) {
    std::signal(signal, SIG_DFL);
  }
  std::raise(signal);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void run(const char* wanted, uint64_t seed) {
  constexpr unsigned kHangS = 120;
  std::snprintf(failing_scene, sizeof failing_scene, "%s, seed %llu\n", wanted, static_cast<unsigned long long>(seed));
  std::signal(SIGABRT, tell_failure);
  std::signal(SIGALRM, tell_failure);
  alarm(kHangS);
  sim::become_torchs_accelerator();
  sim::set_seed(seed);
  const auto begin = std::chrono::steady_clock::now();
  for (const Scenes* const scenes : {&kCudaScenes, &kCudaFailures, &kLaneScenes, &kMembersScenes, &kNcclScenes}) {
    const auto found = scenes->find(wanted);
    if (found == scenes->end()) continue;
    found->second();
    std::printf("%s: %.1f s\n", wanted,
                std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    std::fflush(stdout);
    return;
  }
  REQUIRE(false, "there is no scene %s", wanted);
}
