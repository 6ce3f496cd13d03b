#!/bin/sh
# The service and PostgreSQL in containers, up and healthy. What is given goes to `docker compose up`.
set -eu
cd "$(dirname "$0")"

# Containers see these files with the owner and the rights that they have here, and run as other users: the
# folder is what keeps others of this machine out. What is there stays as it is.
mkdir -p secrets corpora
chmod 700 secrets
make_secret() {
    if [ ! -s "secrets/$1" ]; then
        printf '%s\n' "$2" > "secrets/$1"
        echo "made docker/secrets/$1"
    fi
    chmod 444 "secrets/$1"
}
make_secret fraternal_database_password "$(openssl rand -hex 32)"
make_secret fraternal_admin_token "frt_$(openssl rand -hex 6)_$(openssl rand -hex 32)"
make_secret ray_auth_token "$(openssl rand -hex 32)"

docker compose up --build --detach --wait "$@"
echo "the service is up at http://${FRATERNAL_LISTEN:-127.0.0.1:8123}/; sign in with docker/secrets/fraternal_admin_token"
