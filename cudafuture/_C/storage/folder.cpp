#include "storage/folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "storage/failure.h"

namespace cudafuture::storage {

void sync_folder(const std::string& path) {
  const int folder = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const int code = folder < 0 || ::fsync(folder) != 0 ? errno : 0;
  if (folder >= 0) ::close(folder);
  if (code != 0) throw Failure("cannot sync " + path + ": " + std::generic_category().message(code), code, path);
}

}  // namespace cudafuture::storage
