/* Another project's libixml.so: UPnP's XML library has none of the management symbols. */
void ixmlDocument_free(void *document) { (void)document; }
