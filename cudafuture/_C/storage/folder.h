// What a folder needs beside files.
#pragma once

#include <string>

namespace cudafuture::storage {

// Has the names in a folder survive a crash. Throws Failure.
void sync_folder(const std::string& path);

}  // namespace cudafuture::storage
