// The thread that tells other processes what is pending here: `python -m cudafuture ps` asks it.
//
//     the first operation, or the first wait ──► require() ──► thread "cudafuture-ps" ──► FOLDER/PID.socket
//
// It takes no lock of the interpreter, so that it answers while the main thread holds that lock or sleeps in C++. It
// answers the user of this process and root only.
//
// Lock: mutex_ guards the start, the stop and the client.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <thread>

namespace cudafuture {

class DebugSocket {
 public:
  static DebugSocket& get() noexcept;

  // Sets the folder of the sockets, and the version to tell. An empty folder: there is no socket.
  void configure(std::string folder, std::string version);
  const std::string& folder() const noexcept { return folder_; }

  // Starts the thread, at the first call.
  static void require() noexcept {
    if (!is_required.load(std::memory_order_relaxed)) [[unlikely]]
      get().start();
  }

  // In a forked child: starts a thread that tells whose child it is, if the parent had a thread.
  void start_in_child() noexcept;

  // Ends the thread and removes its files.
  void stop() noexcept;

 private:
  inline static std::atomic<bool> is_required{false};

  void start() noexcept;
  void start_locked() noexcept;
  bool listen() noexcept;
  void loop() noexcept;
  void serve(int client) const noexcept;
  void set_client(int client) noexcept;
  std::string reply() const;
  std::string path(const char* suffix) const;

  std::mutex mutex_;
  std::string folder_;
  std::string version_;
  std::thread thread_;
  int listening_ = -1;
  int stopping_ = -1;  // an eventfd
  int client_ = -1;    // that the thread serves; -1: none
  int parent_ = 0;     // process that this one was forked from, after it had used the library; 0: none
};

}  // namespace cudafuture
