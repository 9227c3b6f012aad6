// Starts threads with names. If the system has none left, the error says what was asked for.
#pragma once

#include <dirent.h>
#include <pthread.h>

#include <cstddef>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace fusedcomm {

// The number of threads of this process; 0 if the system does not tell.
inline int count_threads() {
  int num_threads = 0;
  if (DIR* const tasks = opendir("/proc/self/task")) {
    while (const dirent* task = readdir(tasks)) num_threads += task->d_name[0] != '.';
    closedir(tasks);
  }
  return num_threads;
}

// `name`: at most 15 characters. Throws std::system_error if the thread cannot be started.
template <typename Function>
std::thread start_thread(const std::string& name, Function function) {
  try {
    std::thread thread(std::move(function));
#if defined(__linux__)
    pthread_setname_np(thread.native_handle(), name.c_str());
#endif
    return thread;
  } catch (const std::system_error& error) {
    size_t stack_nbytes = 0;
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) == 0) {  // glibc: with the sizes that new threads get
      pthread_attr_getstacksize(&attributes, &stack_nbytes);
      pthread_attr_destroy(&attributes);
    }
    throw std::system_error(error.code(), "fusedcomm: the system did not start the thread " + name + ", which takes " +
                                              std::to_string(stack_nbytes >> 20) +
                                              " MiB of address space for its stack. This process has " +
                                              std::to_string(count_threads()) +
                                              " thread(s). Raise the limit of processes (ulimit -u, pids.max) or of "
                                              "memory (ulimit -v)");
  }
}

}  // namespace fusedcomm
