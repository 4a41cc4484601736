#include "storage/folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "storage/failure.h"

namespace cudafuture::storage {

void sync_folder(const std::string& path) {
  const int folder = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const int code = folder < 0 || ::fsync(folder) != 0 ? errno : 0;
  if (folder >= 0) ::close(folder);
  if (code != 0) throw Failure("cannot sync " + path + ": " + std::generic_category().message(code), code, path);
}

std::vector<std::string> names_in(const std::string& path) {
  std::error_code error;
  std::vector<std::string> names;
  std::filesystem::directory_iterator entry(path, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    names.push_back(entry->path().filename());
  }
  if (error) throw Failure("cannot look into " + path + ": " + error.message(), error.value(), path);
  return names;
}

}  // namespace cudafuture::storage
