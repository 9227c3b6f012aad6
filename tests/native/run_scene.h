// Runs a scene of a native test. If it fails or hangs, its name and its seed are printed.
#pragma once

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>

// What tell_failure() prints.
inline char failing_scene[200];

inline void tell_failure(int signal) {
  const char* const how = signal == SIGALRM ? "hangs: " : "fails: ";
  if (write(STDERR_FILENO, how, std::strlen(how)) >= 0 &&
      write(STDERR_FILENO, failing_scene, std::strlen(failing_scene)) >= 0) {
    std::signal(signal, SIG_DFL);
  }
  std::raise(signal);
}

// program, name, seed: the command that runs the scene again.
inline void run_scene(const char* program, const char* name, uint64_t seed, void (*scene)()) {
  constexpr unsigned kHangS = 120;
  std::snprintf(failing_scene, sizeof failing_scene, "%s %s --seed %llu\n", program, name,
                static_cast<unsigned long long>(seed));
  std::signal(SIGABRT, tell_failure);
  std::signal(SIGALRM, tell_failure);
  alarm(kHangS);
  const auto begin = std::chrono::steady_clock::now();
  scene();
  alarm(0);
  std::printf("%s: %s: %.1f s\n", program, name,
              std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  std::fflush(stdout);
}
