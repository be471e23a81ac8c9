/* C libraries are built with -I of this folder. The header belongs to the plugin that loads them. */
#include "../plugins/runtimes/c_library/edge_backend.h"
