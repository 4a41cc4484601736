#include "store/folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <system_error>

#include "io/failure.h"

namespace cudafuture::store {

using namespace io;

void sync_folder(const std::string& path) {
  const int folder = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const int code = folder < 0 || ::fsync(folder) != 0 ? errno : 0;
  if (folder >= 0) ::close(folder);
  if (code != 0) throw Failure("cannot sync " + path + ": " + std::generic_category().message(code), code, path);
}

void write_file(const std::string& path, const std::string& content) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file < 0) throw_errno("cannot open", path, errno);
  std::size_t done = 0;
  int code = 0;
  while (code == 0 && done < content.size()) {
    const ssize_t written = ::write(file, content.data() + done, content.size() - done);
    if (written >= 0) done += static_cast<std::size_t>(written);
    if (written < 0 && errno != EINTR) code = errno;
  }
  if (code == 0 && ::fsync(file) != 0) code = errno;
  ::close(file);
  if (code != 0) throw_errno("cannot write", path, code);
}

std::vector<std::string> names_in(const std::string& path) {
  std::error_code error;
  std::vector<std::string> names;
  std::filesystem::directory_iterator entry(path, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    names.push_back(entry->path().filename());
  }
  if (error) throw Failure("cannot list " + path + ": " + error.message(), error.value(), path);
  return names;
}

}  // namespace cudafuture::store
